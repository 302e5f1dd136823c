"""Pretrain a GPT-2 with Megatron-LM: tensor and pipeline parallel, with the training loop of any other model.

    accelerate launch --num_processes 2 --use_megatron_lm --megatron_lm_tp_degree 2 megatron_lm_gpt_pretraining.py
    accelerate launch --num_processes 2 --use_megatron_lm --megatron_lm_pp_degree 2 megatron_lm_gpt_pretraining.py
    accelerate launch megatron_lm_gpt_pretraining.py --model gpt2 --data stories.txt

Nothing in the program names Megatron-LM: the launch chooses it. Without its options the same program trains on one process, or
on replicas. Without `--data`, a tiny GPT-2 learns to count. The last line is a loss below 0.5. Needs transformers, and
megatron-core for Megatron-LM. `--data` is a text file, which is split into sequences of `--length` tokens.
"""

import argparse
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, get_cosine_schedule_with_warmup

from accelerate import Accelerator
from accelerate.utils import set_seed


def make_sequences(args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Sequences of equal length, shape (length,); models of transformers shift the labels themselves."""
    if args.data:
        with open(args.data) as file:
            tokens = AutoTokenizer.from_pretrained(args.model or "gpt2")(file.read(), return_tensors="pt").input_ids[0]
        rows = list(tokens[: len(tokens) // args.length * args.length].view(-1, args.length))
    else:
        rows = [torch.arange(start, start + args.length) % 64 for start in range(640)]
    return [{"input_ids": row, "labels": row} for row in rows]


def make_model(name: str | None) -> Any:
    """A model with random weights: as large as the named one, or a tiny GPT-2."""
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tiny = GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name) if name else tiny)


def main() -> None:
    """Train, and print the loss of the last batch of each epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GPT-2 or Llama of the Hub or a folder, whose sizes are taken")
    parser.add_argument("--data", help="a text file")
    parser.add_argument("--length", type=int, default=16, help="tokens of a sequence")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=8, help="on each data parallel rank")
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    model = make_model(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    loader = DataLoader(make_sequences(args), batch_size=args.batch_size, shuffle=True, drop_last=True)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 10, args.epochs * len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for epoch in range(args.epochs):
        model.train()
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}: loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
