"""A transformer of a few thousand parameters, its data, and the loss curve that every way of training must reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY, LENGTH = 32, 16

TP_PLAN = {
    "embedding": "embedding_rowwise",
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.output": "rowwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
    "head": "colwise_rep",
}


class Attention(nn.Module):
    """Causal self-attention; how many heads a process has follows from the size of what its projections return."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) to the same."""
        batch, length, _ = hidden.shape

        def heads(projection: nn.Module) -> torch.Tensor:
            return projection(hidden).view(batch, length, -1, self.head_width).transpose(1, 2)

        mixed = functional.scaled_dot_product_attention(
            heads(self.query), heads(self.key), heads(self.value), is_causal=True
        )
        mixed = self.output(mixed.transpose(1, 2).reshape(batch, length, -1))
        return functional.dropout(mixed, self.dropout, self.training)


class MLP(nn.Module):
    """Two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) to the same."""
        return self.down(functional.gelu(self.up(hidden)))


class Block(nn.Module):
    """Attention and MLP, each beside a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = MLP(width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) to the same."""
        hidden = hidden + self.attention(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))


class TinyTransformer(nn.Module):
    """A causal language model.

    Args:
        width: Features of a token.
        heads: Attention heads.
        layers: Blocks.
        dropout: Share of attention outputs set to zero.
        tied: Whether embedding and head are one parameter.
    """

    _no_split_modules = ("Block",)

    def __init__(
        self, width: int = 16, heads: int = 4, layers: int = 2, dropout: float = 0.0, tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Token numbers of shape (batch, sequence) to logits of shape (batch, sequence, vocabulary)."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.embedding(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def make_model(seed: int = 0, **options: Any) -> TinyTransformer:
    """The same model whenever the arguments are the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyTransformer(**options)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences in which a token tells the next one, most of the time."""

    def __init__(self, count: int = 64, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(1)
        steps = torch.randint(1, 4, (count, length), generator=generator)
        self.tokens = steps.cumsum(1) % VOCABULARY

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_loader(batch_size: int, count: int = 64, shuffle: bool = False) -> DataLoader[Any]:
    """A loader of `Tokens`."""
    return DataLoader(Tokens(count), batch_size=batch_size, shuffle=shuffle)


def shift(labels: torch.Tensor) -> torch.Tensor:
    """For each place the token that follows; -100, which losses ignore, for the last."""
    return functional.pad(labels[:, 1:], (0, 1), value=-100)


def token_loss(logits: torch.Tensor, shifted: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross entropy of the next tokens."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten(), reduction=reduction)


def batches(loader: Any, steps: int) -> Iterator[Any]:
    """As many batches, over as many epochs as that takes."""
    done = 0
    while True:
        for batch in loader:
            if done == steps:
                return
            done += 1
            yield batch


def reference_curve(
    steps: int,
    batch_size: int,
    optimizer: Callable[..., torch.optim.Optimizer],
    max_norm: float | None = None,
    **options: Any,
) -> list[float]:
    """The losses of plain torch in one process, of batches as large as those of all processes together."""
    model = make_model(**options)
    stepper = optimizer(model.parameters())
    losses = []
    for batch in batches(make_loader(batch_size), steps):
        loss = token_loss(model(batch["input_ids"]), shift(batch["labels"]))
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
    return losses
