"""What the engine stores: full weights and optimizer states by the names of the model, whatever the degrees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn
from typing_extensions import override

from accel_integrations.megatron.model import MegatronEngine
from accel_integrations.megatron.weights.optimizer import ShardedOptimizer, full_optimizer_state, own_optimizer_state
from accel_integrations.megatron.weights.sharded import ShardedWeights
from accel_integrations.prepared.prepared import Prepared
from accel_integrations.training_state.formats.full import FullStates, FullStatesLoad, read_full_states
from accel_integrations.training_state.formats.sharded import is_by_name
from accel_integrations.training_state.interface import CheckpointFiles, LoadRequest, PendingLoad
from accel_integrations.training_state.loading import read_full_optimizer_state
from accel_integrations.training_state.reader import open_model_state, open_optimizer_state


class Storing:
    """States of the prepared model and its optimizer, as one process has them.

    Attributes:
        trained: The prepared model; None before.
        buffers: The buffers of its state dict, by name.
    """

    def __init__(self) -> None:
        self.trained: MegatronEngine | None = None
        self.buffers: dict[str, torch.Tensor] = {}

    def model_of(self, model: nn.Module) -> MegatronEngine | None:
        """The prepared model; None for any other."""
        engine = self.trained
        return engine if engine is not None and model in (engine, engine.parts.original) else None

    def full_state_dict(self, trained: MegatronEngine, keep_values: bool) -> dict[str, torch.Tensor]:
        """The full state dict by the names of the model that was prepared; all ranks call this.

        Args:
            trained: The prepared model.
            keep_values: Whether this rank needs it; if not, the result is empty.
        """
        state_dict = trained.parts.weights.full(keep_values) | self.buffers
        if not keep_values:
            return {}
        original = trained.parts.original
        by_parameter = {one: name for name, one in reversed(list(named_parameters(original))) if name in state_dict}
        for name, parameter in named_parameters(original):
            state_dict.setdefault(name, state_dict[by_parameter[parameter]])  # tied
        return {name: state_dict[name] for name in original.state_dict()}

    def full_optimizer_state(self, optimizer: Any, keep_values: bool) -> dict[str, Any]:
        """The full state dict, as in a run of one process; all ranks call this."""
        return full_optimizer_state(*self._sharded(optimizer), keep_values)

    def names_in(self, optimizer: Any) -> list[list[str]]:
        """The names of the model's parameters in each group of an optimizer."""
        return self._sharded(optimizer)[0].names

    def own_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        """The part of a full state that belongs to this rank's shards."""
        return own_optimizer_state(*self._sharded(optimizer), state)

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Load what `full_optimizer_state` returned, in this run or in one with other degrees."""
        optimizer.optimizer.load_state_dict(self.own_optimizer_state(optimizer, state))

    def _sharded(self, optimizer: Any) -> tuple[ShardedOptimizer, ShardedWeights]:
        engine = self.trained
        if engine is None or engine.sharded is None or optimizer not in (engine.optimizer, engine.sharded.optimizer):
            raise ValueError(
                "The optimizer was not prepared by this accelerator. Pass it to prepare() with its model."
            )
        return engine.sharded, engine.parts.weights


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All names of parameters, tied ones several times."""
    return list(model.named_parameters(remove_duplicate=False))


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

    @override
    def check(self) -> None:
        """Compare the groups and shapes of the optimizers."""
        self._full.check()

    @override
    def check_models(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        for model, weights in zip(models, self._contents.weights, strict=False):
            _name_ties(model, weights)
        self._full.check_models(models)

    @override
    def apply(self) -> None:
        """Load the optimizers, and this rank's shards of the weights."""
        self._full.load_optimizers()
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
