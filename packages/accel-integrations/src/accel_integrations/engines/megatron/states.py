"""Loading the states of a checkpoint, full or by names of parameters, into the shards of Megatron-LM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torch import nn

from accel_integrations.engines.megatron.storing import Storing
from accel_integrations.prepared.prepared import Prepared
from accel_integrations.training_state.formats.full import FullStates, FullStatesLoad, read_full_states
from accel_integrations.training_state.formats.sharded import is_by_name
from accel_integrations.training_state.interface import CheckpointFiles, LoadRequest, PendingLoad, UndoLog
from accel_integrations.training_state.loading import read_full_optimizer_state
from accel_integrations.training_state.reader import open_model_state, open_optimizer_state


@final
class MegatronLoad(PendingLoad):
    """States of a checkpoint, of which every rank takes its shards.

    Args:
        request: The checkpoint, and how to load it.
        prepared: The models and optimizers of this run.
        owner: The prepared model and optimizer.

    Raises:
        ValueError: A file is damaged, or is missing.
    """

    def __init__(self, request: LoadRequest, prepared: Prepared, owner: Storing) -> None:
        self._owner = owner
        self._models: Sequence[nn.Module] = ()
        optimizers = prepared.optimizers
        self._contents = (
            _read_by_name(request.checkpoint, prepared, owner)
            if is_by_name(request.checkpoint.names)
            else read_full_states(request, len(optimizers))
        )
        self._full = FullStatesLoad(request, optimizers, owner, contents=self._contents)

    def check(self) -> None:
        """Compare the groups and shapes of the optimizers."""
        self._full.check()

    def check_models(self, models: Sequence[nn.Module]) -> None:
        """Compare the names and shapes of the weights with the models as they were prepared."""
        self._models = models
        for model, weights in zip(models, self._contents.weights, strict=False):
            _name_ties(model, weights)
        self._full.check_models(models)

    def apply_undoable(self, undo: UndoLog) -> None:
        """Load the optimizers."""
        self._full.apply_undoable(undo)

    def apply(self) -> None:
        """Load this rank's shards of the weights."""
        for model, weights in zip(self._models, self._contents.weights, strict=False):
            trained = self._owner.model_of(model)
            if trained is not None:
                trained.parts.weights.load(weights)


def _name_ties(model: nn.Module, weights: dict[str, Any]) -> None:
    """Add the names of tied parameters under which they were not saved; parameters without values share no memory."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for tied in names.values():
        saved = next((name for name in tied if name in weights), None)
        if saved is not None:
            for name in tied:
                weights.setdefault(name, weights[saved])


def _read_by_name(checkpoint: CheckpointFiles, prepared: Prepared, owner: Storing) -> FullStates:
    """Full states out of files in which ranks stored shards."""
    weights, states = [], []
    for index in range(len(prepared.models)):
        stored = open_model_state(checkpoint.folder, index)
        tensors = {".".join(keys): stored.read_full(keys) for keys in stored.shapes}
        weights.append(tensors | {".".join(keys): stored.read_object(keys) for keys in stored.objects})
    for index, optimizer in enumerate(prepared.optimizers):
        names = owner.names_in(optimizer)
        every = {name for group in names for name in group}
        plain = optimizer.optimizer
        states.append(read_full_optimizer_state(open_optimizer_state(checkpoint.folder, index), plain, names, every))
    return FullStates(weights, states)
