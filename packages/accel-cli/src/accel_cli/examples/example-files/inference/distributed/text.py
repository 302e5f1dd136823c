"""Generate text on several processes: each gets a share of the prompts, and the main process collects what was written.

    accelerate launch --num_processes 2 text.py
    accelerate launch --num_processes 2 text.py --model gpt2 --prompts "Once upon a time" "The last train"

The model fits on each device, and no process waits for another one until the end. `split_between_processes` chooses the
prompts of this process; `gather_object` collects the results of all. Without `--model`, a tiny GPT-2 is trained to count for
a few seconds, and continues sequences of numbers. The last line says which share of them is right: at least 0.95.
Needs transformers.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from accelerate import PartialState
from accelerate.utils import gather_object, set_seed


def make_counting_model(device: torch.device) -> Any:
    """A tiny GPT-2 that has learned to count modulo 32; the same on every process."""
    config = GPT2Config(
        vocab_size=32, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=None
    )
    model = AutoModelForCausalLM.from_config(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        rows = (torch.randint(32, (16, 1), device=device) + torch.arange(16, device=device)) % 32
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def continue_texts(model: Any, prompts: Sequence[str], args: argparse.Namespace, state: PartialState) -> list[str]:
    """What the model writes after each prompt, for prompts of different lengths in one batch."""
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer(list(prompts), padding=True, return_tensors="pt").to(state.device)
    written = model.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False)
    return tokenizer.batch_decode(written, skip_special_tokens=True)


def count_on(model: Any, starts: Sequence[int], args: argparse.Namespace, state: PartialState) -> list[list[int]]:
    """Two numbers of each sequence, and those that the model adds."""
    prompts = torch.tensor([[start, (start + 1) % 32] for start in starts], device=state.device)
    mask = torch.ones_like(prompts)
    return model.generate(
        prompts, attention_mask=mask, max_new_tokens=args.max_new_tokens, do_sample=False, pad_token_id=0
    ).tolist()


def main() -> None:
    """Generate on all processes, and print on the main process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a causal language model of the Hub or a folder")
    parser.add_argument("--prompts", nargs="+", default=["Once upon a time", "The last train", "In the cellar"])
    parser.add_argument("--max_new_tokens", type=int, default=8)
    args = parser.parse_args()

    state = PartialState()
    set_seed(0)
    results: list[Any] = []
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model).to(state.device).eval()
        with state.split_between_processes(args.prompts) as prompts:  # any number of them, on any number of processes
            if prompts:
                results = continue_texts(model, prompts, args, state)
        for text in gather_object(results):
            state.print(text)
    else:
        model = make_counting_model(state.device)
        with state.split_between_processes(list(range(25))) as starts:
            results = count_on(model, starts, args, state)
        print(f"process {state.process_index} has continued {len(results)} sequences", flush=True)
        rows = gather_object(results)
        right = [row == [(row[0] + place) % 32 for place in range(len(row))] for row in rows]
        state.print(f"{len(rows)} sequences, the first: {rows[0]}")
        state.print(f"final accuracy {sum(right) / len(right):.3f}")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
