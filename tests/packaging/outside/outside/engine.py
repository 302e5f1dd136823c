"""An engine: a final class over the neutral one, which counts steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn

from accel_integrations.engines.engine import Engine


@final
class CountingEngine(Engine):
    """Trains each rank by itself, and counts the steps."""

    name = "counting"
    num_steps = 0

    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        return model.to(self.context.state.device) if device_placement else model

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        self.num_steps += 1
        return super().step(optimizer, closure)
