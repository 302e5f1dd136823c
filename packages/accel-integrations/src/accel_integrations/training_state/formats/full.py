"""Full states: one file with the full state dict of each model, and one for each optimizer."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import nn
from typing_extensions import override

from accel_integrations.parallel.full_state import distribute_like
from accel_integrations.prepared.optimizer import plain_optimizer
from accel_integrations.training_state.compatibility import check_optimizer, check_values, complete_ties
from accel_integrations.training_state.interface import (
    CheckpointFiles,
    FileWriter,
    LoadRequest,
    PendingLoad,
    PendingSave,
)
from accel_ops.files.filenames import (
    OPTIMIZER_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME,
    count_files,
    numbered,
    weights_file,
)
from accel_ops.files.serialization import check_loadable, load
from accel_ops.files.tensor_files import read_tensors
from accel_ops.modules import model_has_dtensor

OPTIMIZER_FILE = f"{OPTIMIZER_NAME}.bin"


class OptimizerStates(Protocol):
    """Selects the entries of a full optimizer state for this rank: an engine, or `PlainOptimizers`."""

    def own_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        """The entries of a full state for the parameters that this rank holds."""
        ...

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Load a full state into an optimizer."""
        ...


@final
class PlainOptimizers:
    """Optimizers whose full state every rank holds."""

    def own_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        """The full state: this rank holds all parameters."""
        return state

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Load the full state with `load_state_dict`."""
        optimizer.load_state_dict(state)


@final
class FullStatesSave(PendingSave):
    """Full states of prepared models and optimizers, written by one rank.

    Args:
        weights: The full state dict of each model.
        optimizers: The full state dict of each optimizer.
    """

    def __init__(self, weights: list[dict[str, Any]], optimizers: Sequence[dict[str, Any]]) -> None:
        self.weights = weights
        self._optimizers = optimizers

    @override
    def write(self, files: FileWriter, *, is_writer: bool, safe_serialization: bool) -> None:
        """Write one file for each model and each optimizer."""
        if is_writer:
            write_full_states(files, self.weights, self._optimizers, safe_serialization)


def write_full_states(
    files: FileWriter,
    weights: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Mapping[str, Any]],
    safe_serialization: bool,
) -> None:
    """Write full states.

    Args:
        files: Takes the files.
        weights: The state dict of each model.
        optimizers: The state dict of each optimizer.
        safe_serialization: Whether weights are written as safetensors rather than by `torch.save`.

    Raises:
        TypeError: A state could not be loaded again without running code from the file.
    """
    for index, values in enumerate(weights):
        if not safe_serialization:
            extra = {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}
            check_loadable(extra, f"The state dict of model {index}")
        files.save(weights_file(index, safe_serialization), values, safe_serialization)
    for index, state in enumerate(optimizers):
        name = numbered(OPTIMIZER_FILE, index)
        check_loadable(state, f"The state_dict() for {name}")
        files.save(name, state)


@dataclass(frozen=True)
class FullStates:
    """Full states in CPU memory.

    Attributes:
        weights: The state dict of each model.
        optimizers: The state dict of each optimizer.
    """

    weights: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]


def read_full_states(request: LoadRequest, num_optimizers: int) -> FullStates:
    """Read the files with full states; see `FullStatesLoad`."""
    checkpoint = request.checkpoint
    weights = [
        _read_weights(checkpoint, index, request.load_kwargs)
        for index in range(count_files(checkpoint.names, SAFE_WEIGHTS_NAME, WEIGHTS_NAME))
    ]
    check_count(checkpoint, "optimizer", OPTIMIZER_FILE, num_optimizers)
    names = [numbered(OPTIMIZER_FILE, index) for index in range(num_optimizers)]
    return FullStates(weights, [read_dict(checkpoint, name, request.location, request.load_kwargs) for name in names])


@final
class FullStatesLoad(PendingLoad):
    """Full states of a checkpoint, read into CPU memory.

    Args:
        request: The checkpoint, and how to load it.
        optimizers: The optimizers of this run, prepared or plain; there may be fewer than were saved.
        owner: Selects the entries of an optimizer's state for this rank.
        contents: The states, where they were read already.

    Raises:
        ValueError: A file is damaged, holds more than plain data, or is missing for an optimizer.
    """

    def __init__(
        self,
        request: LoadRequest,
        optimizers: Sequence[Any],
        owner: OptimizerStates,
        contents: FullStates | None = None,
    ) -> None:
        self._checkpoint = request.checkpoint
        self._optimizers = optimizers
        self._owner = owner
        self._strict = request.strict
        self._model_kwargs = request.model_kwargs
        self._models: Sequence[nn.Module] = ()
        if contents is None:
            contents = read_full_states(request, len(optimizers))
        self._weights, self._states = contents.weights, contents.optimizers

    @override
    def check(self) -> None:
        """Compare parameter groups and shapes of all optimizers."""
        for index, (optimizer, state) in enumerate(zip(self._optimizers, self._states, strict=True)):
            where = str(self._checkpoint.path(numbered(OPTIMIZER_FILE, index)))

            def own_state(state: dict[str, Any], optimizer: Any = optimizer) -> dict[str, Any]:
                return self._owner.own_optimizer_state(optimizer, state)

            check_optimizer(plain_optimizer(optimizer), state, where, own_state)

    @override
    def check_models(self, models: Sequence[nn.Module]) -> None:
        """Compare names and shapes, except for models that customize loading."""
        self._models, count = models, len(self._weights)
        if count < len(models):
            raise ValueError(
                f"{len(models)} models are prepared, but the checkpoint {self._checkpoint.folder} holds the weights of "
                f"{count}: {weights_file(count, True)!r} is missing. Prepare the same models as when it was saved, in "
                "the same order."
            )
        for index, (model, weights) in enumerate(zip(models, self._weights, strict=False)):
            complete_ties(model.state_dict(), weights)
            check_values(
                model, weights, f"The weights in {self._checkpoint.folder} do not fit model {index}", self._strict
            )

    def load_optimizers(self) -> None:
        """Load the optimizers alone."""
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            self._owner.load_optimizer_state(optimizer, state)

    @override
    def apply(self) -> None:
        self.load_optimizers()
        for model, weights in zip(self._models, self._weights, strict=False):
            _load_weights(model, weights, self._model_kwargs)


def read_dict(
    checkpoint: CheckpointFiles, name: str, location: Any = "cpu", load_kwargs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read a state dict from a file of a checkpoint.

    Args:
        checkpoint: The checkpoint.
        name: The file.
        location: The device to which its tensors are loaded (`map_location`).
        load_kwargs: Further arguments of `torch.load`.

    Raises:
        ValueError: The file is damaged, holds more than plain data, or something else than a dict.
    """
    with checkpoint.reading():
        state_dict = load(checkpoint.path(name), map_location=location, **(load_kwargs or {}))
    if not isinstance(state_dict, dict):
        raise ValueError(
            f"{checkpoint.path(name)} holds a {type(state_dict).__name__} instead of a state dict. Load another checkpoint."
        )
    return state_dict


def check_count(checkpoint: CheckpointFiles, kind: str, name: str, wanted: int) -> None:
    """Check that there is a file for each object of a kind.

    Raises:
        ValueError: There are fewer.
    """
    count = count_files(checkpoint.names, name)
    if count < wanted:
        raise ValueError(
            f"{wanted} {kind}s are prepared, but the checkpoint {checkpoint.folder} holds {count}: "
            f"{numbered(name, count)!r} is missing. Prepare the same objects as when it was saved, in the same order."
        )


def _read_weights(checkpoint: CheckpointFiles, index: int, load_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A model's weights, memory-mapped: they are copied once, into the model."""
    safe = weights_file(index, safe_serialization=True)
    with checkpoint.reading():
        if safe in checkpoint.names:
            return read_tensors(checkpoint.path(safe))
        path = checkpoint.path(weights_file(index, safe_serialization=False))
        weights = load(path, map_location="cpu", **{"mmap": zipfile.is_zipfile(path), **load_kwargs})
    if not isinstance(weights, dict):
        raise ValueError(
            f"{path} holds a {type(weights).__name__} instead of a model's weights. Load another checkpoint."
        )
    return weights


def _load_weights(model: nn.Module, weights: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    state_dict = model.state_dict() if model_has_dtensor(model) else {}
    if options.get("assign"):  # else parameters would be views of the memory-mapped file
        weights = {name: value.clone() for name, value in weights.items()}
    weights = {
        name: distribute_like(value, state_dict[name]) if name in state_dict else value
        for name, value in weights.items()
    }
    if state_dict and options.get("assign"):
        weights = {
            name: value.to(state_dict[name].device) if name in state_dict else value for name, value in weights.items()
        }
    model.load_state_dict(weights, **options)
