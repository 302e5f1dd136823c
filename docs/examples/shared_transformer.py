"""One small language model, trained with every kind of parallelism; the losses are always the same.

    accelerate launch --cpu --num_processes 1 docs/examples/shared_transformer.py
    accelerate launch --cpu --num_processes 4 docs/examples/shared_transformer.py --tp 2 --shard 2
    accelerate launch --cpu --num_processes 2 docs/examples/shared_transformer.py --cp 2
    accelerate launch --cpu --num_processes 2 docs/examples/shared_transformer.py --sp 2

The batch size is the global one. Sequences are made up: each token is the one before plus 1, 2 or 3.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
from accelerate.utils import TorchTensorParallelConfig, set_seed

VOCABULARY, LENGTH, WIDTH, HEADS = 64, 32, 64, 4

PLAN = {
    "blocks.*.query": "colwise",
    "blocks.*.key": "colwise",
    "blocks.*.value": "colwise",
    "blocks.*.output": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_rep",
}


class Block(nn.Module):
    """Causal attention and two layers, each beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) to the same."""
        normed = self.norm1(x)
        heads = [
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)  # as many heads as this process has
            for layer in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Token numbers and their positions, both (batch, sequence), to logits."""
        x = self.tokens(input_ids) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_data(count: int) -> list[dict[str, torch.Tensor]]:
    """Sequences with the label of each place, which is the token that follows."""
    tokens = torch.randint(1, 4, (count, LENGTH + 1)).cumsum(1) % VOCABULARY
    positions = torch.arange(LENGTH)
    return [{"input_ids": t[:-1], "shift_labels": t[1:], "position_ids": positions} for t in tokens]


def main() -> None:
    """Train, and print the mesh and the losses."""
    parser = argparse.ArgumentParser()
    for axis, what in {"tp": "layers", "cp": "sequences (ring)", "sp": "sequences (heads)", "shard": "state"}.items():
        parser.add_argument(f"--{axis}", type=int, default=1, help=f"ranks that shard {what}")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=16)
    arguments = parser.parse_args()

    sharded = arguments.tp * arguments.cp * arguments.sp * arguments.shard
    replicas = PartialState().num_processes // sharded
    config = ParallelismConfig(
        dp_replicate_size=replicas,
        dp_shard_size=arguments.shard,
        tp_size=arguments.tp,
        cp_size=arguments.cp,
        sp_size=arguments.sp,
        sp_backend="torch",
        tp_handler=TorchTensorParallelConfig(plan=PLAN) if arguments.tp > 1 else None,
    )
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if arguments.shard > 1 else None
    accelerator = Accelerator(parallelism_config=config if config.total_size > 1 else None, fsdp_plugin=plugin)

    set_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(make_data(256), batch_size=arguments.batch_size // config.data_parallel_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(arguments.epochs):
        for batch in loader:
            buffers = list(batch.values())
            with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), no_restore_buffers=set(buffers)):
                logits = model(batch["input_ids"], batch["position_ids"])
                loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
                loss = accelerator.mean_over_tokens(loss, batch["shift_labels"].numel())
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.5f}")
    accelerator.print_parallelism()
    accelerator.end_training()


if __name__ == "__main__":
    main()
