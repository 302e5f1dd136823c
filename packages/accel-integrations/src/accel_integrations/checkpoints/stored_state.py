"""The interface of a stored state: tensors of which each rank reads its own shards."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from accel_ops.modules import to_local

Keys = tuple[str, ...]
CPU = torch.device("cpu")


class StoredState(ABC):
    """A nested state in a file or folder.

    Attributes:
        where: Its file or folder.
        shapes: Shape of every tensor, by the keys that lead to it.
        objects: Keys of everything else.
    """

    def __init__(self, where: Path) -> None:
        self.where = where
        self.shapes: dict[Keys, tuple[int, ...]] = {}
        self.objects: list[Keys] = []

    @abstractmethod
    def dtype(self, keys: Keys) -> torch.dtype:
        """The dtype of a stored tensor."""

    @abstractmethod
    def read(self, keys: Keys, offsets: Sequence[int], sizes: Sequence[int], into: torch.Tensor) -> None:
        """Copy the shard of a tensor that begins at `offsets` into `into`, a tensor of shape `sizes`."""

    @abstractmethod
    def read_object(self, keys: Keys) -> Any:
        """Read an entry that is not a tensor, as plain data only."""

    def fill(self, keys: Keys, like: torch.Tensor, device: torch.device = CPU) -> torch.Tensor:
        """Read a tensor with the placements of another one; the dtype is the stored one.

        Args:
            keys: The keys of the stored tensor.
            like: A tensor or DTensor of the same shape.
            device: Where to; in CPU memory it takes nothing of that in which the model is, until it is loaded.
        """
        filled = torch.empty_like(like, dtype=self.dtype(keys), device=device)
        part = to_local(filled)
        if part is filled:
            self.read(keys, (0,) * filled.dim(), tuple(filled.shape), filled)
            return filled
        for chunk in filled.__create_chunk_list__():  # type: ignore[attr-defined]
            if part.numel():
                self.read(keys, tuple(chunk.offsets), tuple(chunk.sizes), part)
        return filled

    def read_full(self, keys: Keys) -> torch.Tensor:
        """Read a full tensor into CPU memory."""
        return self.fill(keys, torch.empty(self.shapes[keys]))

    def read_range(self, keys: Keys, begin: int, count: int) -> torch.Tensor:
        """Read consecutive values of a flattened tensor into CPU memory, of shape (count,)."""
        shape = self.shapes[keys]
        if not shape:
            return self.read_full(keys).view(1)
        width = math.prod(shape[1:])
        first, last = begin // width, -(-(begin + count) // width)
        rows = torch.empty((last - first, *shape[1:]), dtype=self.dtype(keys))
        self.read(keys, (first, *(0 for _ in shape[1:])), tuple(rows.shape), rows)
        return rows.flatten()[begin - first * width :][:count]
