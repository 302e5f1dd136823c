"""How tensors of a Hugging Face model become one parameter of megatron-core, and its shards; all of it can be undone exactly.

Legend: d = head size, g = groups of query heads (heads of keys and values), h = query heads, f = hidden size of the
MLP, v = vocabulary. Each layout also applies to the states of optimizers, which have the shapes of the parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


class Layout(ABC):
    """How one parameter is built from tensors of the Hugging Face model, and sharded over tensor-parallel ranks."""

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds another part, rather than all of it."""
        return True

    @abstractmethod
    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The full parameter of megatron-core from the tensors of the model."""

    @abstractmethod
    def split(self, full: Tensor) -> list[Tensor]:
        """The tensors of the model from the full parameter."""

    @abstractmethod
    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """The shard of one of `size` tensor-parallel ranks."""

    @abstractmethod
    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The full parameter from the shards of all tensor-parallel ranks."""


@dataclass(frozen=True)
class Plain(Layout):
    """One tensor of the model.

    Args:
        dim: Along which dimension it is sharded; None where every rank holds all of it.
        transposed: Whether the model stores it as (in, out), as GPT-2 does.
    """

    dim: int | None = None
    transposed: bool = False

    @property
    def is_sharded(self) -> bool:
        """Not without a dimension."""
        return self.dim is not None

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor itself, as (out, in)."""
        return parts[0].t() if self.transposed else parts[0]

    def split(self, full: Tensor) -> list[Tensor]:
        """The tensor itself, as the model stores it."""
        return [full.t() if self.transposed else full]

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """Consecutive rows or columns; all of them without a dimension."""
        return full if self.dim is None else full.chunk(size, self.dim)[rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The shards in order; any of them without a dimension."""
        return shards[0] if self.dim is None else torch.cat(list(shards), self.dim)


@dataclass(frozen=True)
class Vocabulary(Layout):
    """Rows by token, sharded over ranks after rows of zeros that make their number divisible.

    Args:
        num_tokens: The size of the vocabulary (v).
        num_rows: The number of rows with padding.
    """

    num_tokens: int
    num_rows: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows with padding."""
        return F.pad(parts[0], (*(0, 0) * (parts[0].ndim - 1), 0, self.num_rows - self.num_tokens))

    def split(self, full: Tensor) -> list[Tensor]:
        """The rows without padding."""
        return [full[: self.num_tokens]]

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """The rows of consecutive tokens."""
        return full.chunk(size)[rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The shards in order."""
        return torch.cat(list(shards))


@dataclass(frozen=True)
class QueryKeyValue(Layout):
    """Queries, keys and values in one matrix: for each group its queries, then its key, then its value.

    Args:
        heads: Query heads (h); 0 for keys and values alone, as where one sequence attends to another.
        groups: Heads of keys and values (g).
        head_size: Size of a head (d).
        fused: Whether the model stores all three in one tensor.
        transposed: Whether that tensor is (in, out).
    """

    heads: int
    groups: int
    head_size: int
    fused: bool = False
    transposed: bool = False

    @property
    def _rows(self) -> list[int]:
        of_keys = self.groups * self.head_size
        return [*([self.heads * self.head_size] if self.heads else []), of_keys, of_keys]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Rows of the three, group by group: (h + 2g) * d of them."""
        if self.fused:
            one = parts[0].t() if self.transposed and parts[0].ndim == 2 else parts[0]
            parts = one.split(self._rows)
        by_group = [part.reshape(self.groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def split(self, full: Tensor) -> list[Tensor]:
        """Queries, keys and values as the model stores them."""
        by_group = full.reshape(self.groups, -1, *full.shape[1:])
        per_group = [rows // self.groups for rows in self._rows]
        parts = [part.flatten(0, 1) for part in by_group.split(per_group, dim=1)]
        if not self.fused:
            return parts
        one = torch.cat(parts)
        return [one.t() if self.transposed and one.ndim == 2 else one]

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """The rows of consecutive groups."""
        return full.chunk(size)[rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The shards in order: groups are never cut."""
        return torch.cat(list(shards))


@dataclass(frozen=True)
class GateAndUp(Layout):
    """The gate's and the up projection's matrices (f rows each) in one, of which each rank holds a slice of both.

    Args:
        fused: Whether the model stores both in one tensor.
    """

    fused: bool = False

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The gate's rows above the others."""
        return torch.cat(list(parts))

    def split(self, full: Tensor) -> list[Tensor]:
        """The two halves, as the model stores them."""
        return [full] if self.fused else list(full.chunk(2))

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """A slice of each half."""
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The halves of all slices."""
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
