"""The states of models and optimizers on their way into a checkpoint or out of one: what engines and checkpoints agree on.

An engine says what its ranks hold (`Engine.save`) and what they need (`Engine.open`); the checkpoint says when: a save
collects, lets hooks look, then writes; a load compares everything before anything changes.
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
        """Where they are."""
        ...

    @property
    def names(self) -> frozenset[str]:
        """Their names, relative to the folder."""
        ...

    def path(self, name: str) -> Path:
        """Where one of them is."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """A block that reads files, and whose errors say whether a file is damaged."""
        ...


class FileWriter(Protocol):
    """Takes the objects of a training state, each under a file name."""

    folder: Path

    def save(self, name: str, obj: Any, safe_serialization: bool = False) -> None:
        """Write one file."""
        ...

    def adopt(self, names: Iterable[str]) -> None:
        """Take over files that somebody else wrote into the folder."""
        ...


class UndoLog(Protocol):
    """Keeps what objects were before a load, to bring it back when another one refuses its state."""

    def keep_optimizer(self, optimizer: Any) -> None:
        """Keep the state of an optimizer without wrappers."""
        ...

    def keep_values(self, model: nn.Module) -> None:
        """Keep the parameters and buffers of a model."""
        ...


class PendingSave(ABC):
    """States that were collected and not written yet.

    Attributes:
        weights: The full state dict of each prepared model, which hooks may change; empty where ranks write shards.
    """

    weights: list[dict[str, Any]]

    @abstractmethod
    def write(self, files: FileWriter, *, is_writer: bool, safe_serialization: bool) -> None:
        """Write them; all ranks call this.

        Args:
            files: Where to.
            is_writer: Whether this rank writes what is the same on all of them.
            safe_serialization: Whether full weights become safetensors rather than files of `torch.save`.

        Raises:
            TypeError: A state could not be loaded again without running code from the file.
            OSError: A file could not be written.
        """


class PendingLoad(ABC):
    """States of a checkpoint that were found and not applied yet. All ranks call each method, in this order."""

    def check(self) -> None:
        """Compare what was read of optimizers with those of this run.

        Raises:
            ValueError: It does not fit.
        """

    @abstractmethod
    def check_models(self, models: Sequence[nn.Module]) -> None:
        """Settle which models are loaded, and compare their weights with them.

        Args:
            models: As the program built them: the prepared ones that load hooks left.

        Raises:
            ValueError: There are weights missing, too many, or of other shapes.
        """

    def apply_undoable(self, undo: UndoLog) -> None:
        """Give their states to objects that may still refuse them, noting in `undo` what they were before."""

    @abstractmethod
    def apply(self) -> None:
        """Give everything else its state; it was compared and cannot refuse."""


def warn_of_unused(options: Mapping[str, Any]) -> None:
    """Say which further arguments of `save_state` have no effect with this engine."""
    if options:
        names = ", ".join(map(repr, sorted(options)))
        warn_user(f"save_state has no use for {names} with this engine: leave it out")
