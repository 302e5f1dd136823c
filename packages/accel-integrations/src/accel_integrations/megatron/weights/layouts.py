"""How tensors of a Hugging Face model become one parameter of megatron-core, and its shards; all of it can be undone exactly.

Legend: d = head size, g = groups of query heads (heads of keys and values), h = query heads, f = hidden size of the
MLP, v = vocabulary. Each layout also applies to the states of optimizers, which have the shapes of the parameters.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override


class Layout(ABC):
    """How one parameter is built from tensors of the Hugging Face model, and sharded over tensor-parallel ranks.

    Attributes:
        dim: Along which dimension it is sharded; None where every rank holds all of it.
    """

    dim: int | None = 0

    @abstractmethod
    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The full parameter of megatron-core from the tensors of the model."""

    @abstractmethod
    def split(self, full: Tensor) -> list[Tensor]:
        """The tensors of the model from the full parameter."""

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """The shard of one of `size` tensor-parallel ranks."""
        return full if self.dim is None else full.chunk(size, self.dim)[rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The full parameter from the shards of all tensor-parallel ranks."""
        return shards[0] if self.dim is None else torch.cat(list(shards), self.dim)


@dataclass(frozen=True)
class Plain(Layout):
    """One tensor of the model.

    Args:
        dim: As for `Layout`.
        transposed: Whether the model stores it as (in, out), as GPT-2 does.
    """

    dim: int | None = None
    transposed: bool = False

    @override
    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor itself, as (out, in)."""
        return parts[0].t() if self.transposed else parts[0]

    @override
    def split(self, full: Tensor) -> list[Tensor]:
        """The tensor itself, as the model stores it."""
        return [full.t() if self.transposed else full]


REPLICATED, ROWS, COLUMNS = Plain(), Plain(0), Plain(1)


@dataclass(frozen=True)
class Vocabulary(Layout):
    """Rows by token, sharded over ranks after rows of zeros that make their number divisible.

    Args:
        num_tokens: The size of the vocabulary (v).
        num_rows: The number of rows with padding.
    """

    num_tokens: int
    num_rows: int

    @override
    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows with padding."""
        return F.pad(parts[0], (*(0, 0) * (parts[0].ndim - 1), 0, self.num_rows - self.num_tokens))

    @override
    def split(self, full: Tensor) -> list[Tensor]:
        """The rows without padding."""
        return [full[: self.num_tokens]]


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

    @override
    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Rows of the three, group by group: (h + 2g) * d of them."""
        if self.fused:
            one = parts[0].t() if self.transposed and parts[0].ndim == 2 else parts[0]
            parts = one.split(self._rows)
        by_group = [part.reshape(self.groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    @override
    def split(self, full: Tensor) -> list[Tensor]:
        """Queries, keys and values as the model stores them."""
        by_group = full.reshape(self.groups, -1, *full.shape[1:])
        per_group = [rows // self.groups for rows in self._rows]
        parts = [part.flatten(0, 1) for part in by_group.split(per_group, dim=1)]
        if not self.fused:
            return parts
        one = torch.cat(parts)
        return [one.t() if self.transposed and one.ndim == 2 else one]


@dataclass(frozen=True)
class GateAndUp(Layout):
    """The gate's and the up projection's matrices (f rows each) in one, of which each rank holds a slice of both.

    Args:
        fused: Whether the model stores both in one tensor.
    """

    fused: bool = False

    @override
    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The gate's rows above the others."""
        return torch.cat(list(parts))

    @override
    def split(self, full: Tensor) -> list[Tensor]:
        """The two halves, as the model stores them."""
        return [full] if self.fused else list(full.chunk(2))

    @override
    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """A slice of each half."""
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])

    @override
    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The halves of all slices."""
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])


@dataclass(frozen=True)
class Weight:
    """One parameter of megatron-core.

    Args:
        name: Its name, with the number of the layer in the full model.
        sources: The tensors of the Hugging Face model that it consists of, by name, or rows of them: "experts.down_proj[3]" is
            what the tensor has of expert 3.
        layout: How it consists of them.
    """

    name: str
    sources: tuple[str, ...]
    layout: Layout

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to one expert of a mixture, which not all replicas have."""
        return ".local_experts." in self.name


ROW = re.compile(r"(.+)\[(\d+)\]")


def tensor_name(source: str) -> str:
    """The name of the tensor to which a source belongs."""
    match = ROW.fullmatch(source)
    return source if match is None else match[1]


def rows_of(source: str, tensor: Tensor) -> Tensor:
    """The part of a tensor that a source means."""
    match = ROW.fullmatch(source)
    return tensor if match is None else tensor[int(match[2])]


def stack_rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, with rows stacked.

    Args:
        tensors: By source; of a tensor all rows or none.
    """
    rows: dict[str, dict[int, Tensor]] = {}
    for source, tensor in tensors.items():
        match = ROW.fullmatch(source)
        if match is not None:
            rows.setdefault(match[1], {})[int(match[2])] = tensor
    stacked = {name: torch.stack([by_row[row] for row in sorted(by_row)]) for name, by_row in rows.items()}
    return {tensor_name(source): stacked.get(tensor_name(source), tensor) for source, tensor in tensors.items()}
