"""One process: plain PyTorch."""

from __future__ import annotations

from typing import final

from torch import nn

from accel_integrations.engines.engine import Engine
from accel_integrations.engines.placing import move_model


@final
class SingleEngine(Engine):
    """Trains in one process: the defaults of `Engine`."""

    name = "single"
    accumulates_in_grad = True

    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        """Move the model to the device."""
        return move_model(model, self.context.state.device) if device_placement else model

    @property
    def is_replicated(self) -> bool:
        """There are no other ranks."""
        return True
