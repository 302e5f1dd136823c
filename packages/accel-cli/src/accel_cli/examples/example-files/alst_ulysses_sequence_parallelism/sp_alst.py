"""Train on sequences that are sharded over processes: sequence parallelism by all-to-all, as DeepSpeed-Ulysses and ALST do it.

    accelerate launch --num_processes 2 sp_alst.py --sp_size 2
    accelerate launch --num_processes 8 sp_alst.py --sp_size 4 --model meta-llama/Llama-3.2-1B --length 65536

Each rank has a shard of every sequence; for attention alone, an all-to-all gives it full sequences for some of the heads. So the
memory of activations is divided by `--sp_size`. Prepared loaders yield the shards, with `position_ids`; `batch["shift_labels"]`
is the shard of the labels. The mean of the ranks' losses is taken over their tokens (`mean_over_tokens`). `--batch_size` is that of the
ranks that share a sequence together. Without `--model`, a tiny Llama learns to count. The last line is a loss below 0.2.
Needs transformers; the model keeps its attention, and DeepSpeed is not needed.
"""

import argparse
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import set_seed


def make_model(args: argparse.Namespace) -> Any:
    """The named model, or a tiny Llama with random weights."""
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, max_position_embeddings=args.length, **sizes))


def main() -> None:
    """Train, and print the loss of each epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sp_size", type=int, help="ranks that share a sequence; default: all")
    parser.add_argument("--model", help="a causal language model of the Hub or a folder")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence; a multiple of --sp_size")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    args = parser.parse_args()

    processes = PartialState().num_processes
    sp_size = args.sp_size or processes
    config = ParallelismConfig(dp_replicate_size=processes // sp_size, sp_size=sp_size)
    accelerator = Accelerator(parallelism_config=config if config.total_size > 1 else None)
    set_seed(0)
    model = make_model(args)
    starts = torch.randint(64, (256,))
    sequences = [torch.arange(start, start + args.length) % model.config.vocab_size for start in starts]
    loader = DataLoader([{"input_ids": row, "labels": row} for row in sequences], batch_size=args.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(args.epochs):
        model.train()
        for batch in loader:
            loss = model(**batch, use_cache=False).loss
            labels = batch["shift_labels"] if sp_size > 1 else batch["labels"][:, 1:]
            loss = accelerator.mean_over_tokens(loss, (labels != -100).sum())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        shape = tuple(batch["input_ids"].shape)
        loss = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"epoch {epoch + 1}: a rank's batches {shape}, loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
