"""Train a language model on a device mesh: replicas, FSDP2 shards, tensor and context parallelism, in any combination.

    accelerate launch --num_processes 2 nd_parallel.py --tp_size 2
    accelerate launch --num_processes 8 nd_parallel.py --dp_replicate_size 2 --dp_shard_size 2 --tp_size 2
    accelerate launch --num_processes 8 nd_parallel.py --dp_shard_size 4 --cp_size 2 --model meta-llama/Llama-3.2-1B

The product of the sizes is the number of processes; without sizes, all processes are FSDP2 shards. `--batch_size` is the
global one, so every combination takes the same steps and ends with the same loss. Without `--model`, a tiny Llama learns to
count. The last line is a loss below 0.2. Needs transformers.
"""

import argparse
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
from accelerate.utils import set_seed


def make_sequences(count: int, length: int, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Numbers that grow by one. The label of a place is the token behind it: a shard of a sequence cannot shift them."""
    places = torch.arange(length)
    rows = [torch.arange(start, start + length + 1) % vocabulary for start in torch.randint(vocabulary, (count,))]
    return [
        {"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:], "position_ids": places} for row in rows
    ]


def make_model(name: str | None) -> Any:
    """The named model, or a tiny Llama with random weights."""
    if name:
        return AutoModelForCausalLM.from_pretrained(name)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes))


def make_accelerator(args: argparse.Namespace) -> Accelerator:
    """An accelerator with the mesh of the command line."""
    others = args.dp_replicate_size * args.tp_size * args.cp_size
    config = ParallelismConfig(
        dp_replicate_size=args.dp_replicate_size,
        dp_shard_size=args.dp_shard_size or PartialState().num_processes // others,
        tp_size=args.tp_size,
        cp_size=args.cp_size,
    )
    if config.total_size == 1:
        return Accelerator()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    sharded = config.dp_shard_size > 1
    return Accelerator(parallelism_config=config, fsdp_plugin=plugin if sharded else None)


def main() -> None:
    """Train, and print the mesh and the loss of each epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dp_replicate_size", "--dp-replicate-size", type=int, default=1, help="replicas, which read different data"
    )
    parser.add_argument(
        "--dp_shard_size", "--dp-shard-size", type=int, help="shards of a replica (FSDP2); default: what is left"
    )
    parser.add_argument("--tp_size", "--tp-size", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--cp_size", "--cp-size", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--model", help="a causal language model of the Hub or a folder")
    parser.add_argument("--length", "--sequence-length", type=int, default=32, help="tokens of a sequence")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=16, help="over all processes together")
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    args = parser.parse_args()

    accelerator = make_accelerator(args)
    set_seed(0)
    model = make_model(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    readers = accelerator.parallelism_config.data_parallel_size if accelerator.parallelism_config else 1
    sequences = make_sequences(256, args.length, model.config.vocab_size)
    loader = DataLoader(sequences, batch_size=args.batch_size // readers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(args.epochs):
        model.train()
        for batch in loader:
            buffers = list(batch.values())
            with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), no_restore_buffers=set(buffers)):
                loss = model(**batch).loss
                loss = accelerator.mean_over_tokens(loss, batch["shift_labels"].numel())  # of all ranks of a sequence
                accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}: loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
    accelerator.print_parallelism()
    accelerator.print(f"final loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
