"""What the engine stores: full weights and optimizer states by the names of the model, whatever the degrees."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel_integrations.engines.megatron.model import MegatronEngine
from accel_integrations.engines.megatron.optimizer_states import full_optimizer_state, own_optimizer_state
from accel_integrations.engines.megatron.optimizing import ShardedOptimizer
from accel_integrations.engines.megatron.weights import ShardedWeights


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

    def full_state_dict(self, made: MegatronEngine, keep_values: bool) -> dict[str, torch.Tensor]:
        """The full state dict by the names of the model that was prepared; all ranks call this.

        Args:
            made: The prepared model.
            keep_values: Whether this rank needs it; if not, the result is empty.
        """
        state_dict = made.parts.weights.full(keep_values) | self.buffers
        if not keep_values:
            return {}
        original = made.parts.original
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
