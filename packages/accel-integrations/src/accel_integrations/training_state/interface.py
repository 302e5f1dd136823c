"""The interface between engines and checkpoints for the states of models and optimizers.

An engine collects what its ranks hold (`Engine.save`) and reads what they need (`Engine.open`); the checkpoint decides
when: a save collects, calls hooks, then writes; a load compares everything before anything changes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from accel_ops.files.durable import fsync_file, write_atomically
from accel_ops.files.serialization import serialize
from accel_ops.modules import to_local
from accel_state.warning import warn_user

if TYPE_CHECKING:
    from torch import nn


class CheckpointFiles(Protocol):
    """The files of a complete checkpoint."""

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint."""
        ...

    @property
    def names(self) -> frozenset[str]:
        """Their names, relative to the folder."""
        ...

    def path(self, name: str) -> Path:
        """The path of one of them."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """A context in which files are read, and whose errors say whether a file is damaged."""
        ...


@dataclass(frozen=True)
class LoadRequest:
    """What a call of `load_state` asks an engine for.

    Attributes:
        checkpoint: The files of a complete checkpoint.
        location: Where tensors of optimizer states are loaded, as `map_location` of `torch.load`.
        load_kwargs: Further arguments of `torch.load`.
        model_kwargs: The extra keyword arguments of `load_state`, for `load_state_dict` of the models.
    """

    checkpoint: CheckpointFiles
    location: Any
    load_kwargs: Mapping[str, Any]
    model_kwargs: Mapping[str, Any]

    @property
    def strict(self) -> bool:
        """Whether the names of weights must be the same on both sides."""
        return bool(self.model_kwargs.get("strict", True))


class FileWriter(Protocol):
    """Writes the objects of a training state, each under a file name."""

    folder: Path

    def save(self, name: str, obj: Any, safe_serialization: bool = False) -> None:
        """Write one file."""
        ...

    def save_sharded(self, name: str, state: dict[str, Any]) -> None:
        """Write the shards of a state in the format of torch.distributed.checkpoint; all ranks call this.

        Args:
            name: The folder of its files, relative to that of the checkpoint.
            state: Nested, with DTensors.
        """
        ...

    def adopt(self, names: Iterable[str]) -> None:
        """Add files that were written into the folder by others, such as torch.distributed.checkpoint."""
        ...


class PendingSave(ABC):
    """States that are collected, but not written yet.

    Attributes:
        weights: The full state dict of each prepared model, which hooks may change; empty where ranks write shards.
    """

    weights: list[dict[str, Any]]

    @abstractmethod
    def write(self, files: FileWriter, *, is_writer: bool, safe_serialization: bool) -> None:
        """Write the states; all ranks call this.

        Args:
            files: Takes the files.
            is_writer: Whether this rank writes what is the same on all ranks.
            safe_serialization: Whether full weights are written as safetensors rather than by `torch.save`.

        Raises:
            TypeError: A state could not be loaded again without running code from the file.
            OSError: A file could not be written.
        """


class PendingLoad(ABC):
    """States of a checkpoint that are read, but not loaded yet. All ranks call each method, in this order."""

    def check(self) -> None:
        """Compare optimizer states with the optimizers of this run.

        Raises:
            ValueError: A state does not fit.
        """

    @abstractmethod
    def check_models(self, models: Sequence[nn.Module]) -> None:
        """Choose which models are loaded, and compare the weights with them.

        Args:
            models: The prepared models, without wrappers, that load hooks have left in the list.

        Raises:
            ValueError: Weights are missing, unexpected, or of other shapes.
        """

    @abstractmethod
    def apply(self) -> None:
        """Load the optimizers, then the models that were chosen."""


def warn_of_unused(options: Mapping[str, Any]) -> None:
    """Warn about extra keyword arguments of `save_state` that have no effect with this engine."""
    if options:
        names = ", ".join(map(repr, sorted(options)))
        warn_user(f"save_state: {names} has no effect with this engine. Leave it out.")


class FolderWriter:
    """Writes files one by one into an existing folder, each with an atomic rename."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, name: str, obj: Any, safe_serialization: bool = False) -> None:
        """Write one file and fsync it."""
        with write_atomically(self.folder / name) as file:
            serialize(obj, file, safe_serialization)

    def save_sharded(self, name: str, state: dict[str, Any]) -> None:
        """Write this rank's shards of a state into a folder in it, and fsync them."""
        from accel_integrations.training_state.formats.shard_writing import write_sharded

        self.adopt(write_sharded(self.folder, name, state))

    def adopt(self, names: Iterable[str]) -> None:
        """Fsync files that an engine wrote into the folder."""
        for name in names:
            fsync_file(self.folder / name)


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

    def read_entry(self, keys: Keys) -> Any:
        """Read a full tensor into CPU memory, or an entry that is not a tensor."""
        return self.read_full(keys) if keys in self.shapes else self.read_object(keys)

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
