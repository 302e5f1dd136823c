"""An engine: like DDP, and on one process like plain PyTorch, but it counts the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from accel_integrations.engines.ddp import DDPEngine
from accel_integrations.engines.delegating import DelegatingEngine
from accel_integrations.engines.engine import EngineContext
from accel_integrations.engines.single import SingleEngine


@final
class CountingEngine(DelegatingEngine):
    """Counts the steps."""

    name = "counting"
    num_steps = 0

    def __init__(self, context: EngineContext) -> None:
        super().__init__(DDPEngine(context) if context.state.num_processes > 1 else SingleEngine(context))

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        self.num_steps += 1
        return self.inner.step(optimizer, closure)
