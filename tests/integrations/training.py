"""The smallest set-up in which engines train, without the accelerator on top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from accel_integrations.engines.engine import Engine, EngineContext
from accel_integrations.engines.registry import make_engine
from accel_integrations.prepared.prepared import Prepared
from accel_state.accelerator_state import AcceleratorState
from accel_state.gradient_state import GradientState
from accel_state.settings.accumulation import GradientAccumulationPlugin
from accel_state.settings.handlers import Handlers

FEATURES = 4


def new_engine(
    mixed_precision: str = "no",
    handlers: Sequence[Any] = (),
    accumulation: GradientAccumulationPlugin | None = None,
    **context: Any,
) -> Engine:
    state = AcceleratorState(mixed_precision=mixed_precision, cpu=True, _from_accelerator=True)
    gradient_state = GradientState(accumulation or GradientAccumulationPlugin(num_steps=1))
    return make_engine(EngineContext(state, gradient_state, Handlers.sort(handlers), Prepared(), **context))


def prepare(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    model = engine.prepare_model(engine.precision.wrap_forward(engine.precision.convert(model)))
    engine.context.prepared.models.append(model)
    if optimizer is None:
        return model
    prepared = engine.prepare_optimizer(optimizer, device_placement=True)
    engine.context.prepared.optimizers.append(prepared)
    return model, prepared


def new_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 2))


def new_batch(size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(size, FEATURES, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def assert_same_gradients(model: nn.Module, expected: nn.Module) -> None:
    """Check gradients, whole or in shards, against those of a model of the same architecture."""
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        gradient: Any = mine.grad
        actual = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        torch.testing.assert_close(actual, theirs.grad, atol=1e-6, rtol=0)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(inputs))


class Blocks(nn.Module):
    """A model with repeated blocks."""

    def __init__(self, width: int = FEATURES, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)
