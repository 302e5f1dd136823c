"""Gradient accumulation for causal language models, with per-token loss normalization.

    accelerate launch gradient_accumulation_for_autoregressive_models.py
    accelerate launch --num_processes 2 gradient_accumulation_for_autoregressive_models.py --gradient_accumulation_steps 2
    accelerate launch gradient_accumulation_for_autoregressive_models.py --model gpt2 --data stories.txt

Sequences have different lengths. The mean of the micro-batches' losses would weigh a token of a short sequence more than one
of a long sequence. What differs from `gradient_accumulation.py`: the plugin says `average_over="weights"`, and `backward`
how many tokens a loss is the mean of. Then a step is that of one large batch, on any number of processes.
Without options, a tiny GPT-2 learns to count. The last line is a loss below 0.5. Needs transformers. Each line of `--data` is a text.
"""

import argparse
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed

IGNORED = -100  # a label that has no loss


def make_sequences(args: argparse.Namespace) -> list[torch.Tensor]:
    """Token ids, each of shape (length,); lengths differ."""
    if args.data:
        tokenizer = AutoTokenizer.from_pretrained(args.model or "gpt2")
        with open(args.data) as file:
            texts = [line.strip() for line in file if line.strip()]
        return [tokenizer(text, truncation=True, max_length=512, return_tensors="pt").input_ids[0] for text in texts]
    draw = torch.Generator().manual_seed(0)
    starts, lengths = torch.randint(32, (512,), generator=draw), torch.randint(4, 24, (512,), generator=draw)
    return [torch.arange(start, start + length) % 32 for start, length in zip(starts, lengths, strict=True)]


def collate(sequences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Token ids, mask and labels, each of shape (batch, longest length)."""
    labels = pad_sequence(sequences, batch_first=True, padding_value=IGNORED)
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels != IGNORED).long(), "labels": labels}


def make_model(name: str | None) -> Any:
    """The named model, or a tiny GPT-2 with random weights."""
    if name:
        return AutoModelForCausalLM.from_pretrained(name)
    config = GPT2Config(vocab_size=32, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    """Train, and print the loss of the last epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a causal language model of the Hub or a folder")
    parser.add_argument("--data", help="a text file, each line a sequence")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2, help="micro-batches per optimizer step")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=4, help="of a micro-batch, on each process")
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], help="default: as launched")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    args = parser.parse_args()

    plugin = GradientAccumulationPlugin(num_steps=args.gradient_accumulation_steps, average_over="weights")
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision, gradient_accumulation_plugin=plugin)
    set_seed(0)
    model = make_model(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    loader = DataLoader(make_sequences(args), batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(args.epochs):
        model.train()
        total = torch.zeros(2, device=accelerator.device)  # of the losses of all tokens, and their number
        for batch in loader:
            tokens = (batch["labels"][:, 1:] != IGNORED).sum()  # those that are predicted
            with accelerator.accumulate(model):
                loss = model(**batch).loss  # the mean over these tokens
                accelerator.backward(loss, weight=tokens)
                optimizer.step()
                optimizer.zero_grad()
            total += torch.stack([loss.detach() * tokens, tokens])
        summed, count = accelerator.reduce(total, "sum").tolist()
        accelerator.print(f"epoch {epoch + 1}: loss {summed / count:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
