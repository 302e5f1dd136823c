"""The interface between engines and checkpoints for the states of models and optimizers.

An engine collects what its ranks hold (`Engine.save`) and reads what they need (`Engine.open`); the checkpoint decides
when: a save collects, calls hooks, then writes; a load compares everything before anything changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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


class UndoLog(Protocol):
    """Keeps the states of objects before a load, to restore them when loading another object fails."""

    def keep_optimizer(self, optimizer: Any) -> None:
        """Keep the state of an optimizer without wrappers."""
        ...

    def keep_values(self, model: nn.Module) -> None:
        """Keep the parameters and buffers of a model."""
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

    def apply_undoable(self, undo: UndoLog) -> None:
        """Load objects that may still raise an error, after keeping their states in `undo`."""

    @abstractmethod
    def apply(self) -> None:
        """Load everything else; it was compared and cannot fail."""


def warn_of_unused(options: Mapping[str, Any]) -> None:
    """Warn about extra keyword arguments of `save_state` that have no effect with this engine."""
    if options:
        names = ", ".join(map(repr, sorted(options)))
        warn_user(f"save_state: {names} has no effect with this engine. Leave it out.")
