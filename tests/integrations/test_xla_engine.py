"""What the engine of torch_xla does between several processes, with a stand-in for the library: when it all-reduces, and what.

On devices that compute: `tests/xla`.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_integrations.engines.engine import EngineContext
from accel_integrations.engines.xla import XlaEngine
from accel_integrations.prepared.prepared import Prepared
from accel_state.accelerator_state import AcceleratorState
from accel_state.gradient_state import GradientState
from accel_state.settings.accumulation import GradientAccumulationPlugin
from accel_state.settings.data import DataLoaderConfiguration
from accel_state.settings.handlers import Handlers

WORLD = 4


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[list[torch.Tensor]]:
    """The gradients of each all-reduce; those of all processes are equal."""
    calls: list[list[torch.Tensor]] = []

    def all_reduce(how: str, tensors: list[torch.Tensor], scale: float) -> None:
        assert (how, scale) == ("sum", 1 / WORLD)
        calls.append([tensor.clone() for tensor in tensors])
        for tensor in tensors:
            tensor.mul_(WORLD * scale * 2)  # twice, to see that it happened

    package = types.ModuleType("torch_xla")
    package.sync = lambda **_: None  # type: ignore[attr-defined]
    core, model = types.ModuleType("torch_xla.core"), types.ModuleType("torch_xla.core.xla_model")
    model.all_reduce = all_reduce  # type: ignore[attr-defined]
    for module in (package, core, model):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("XLA_USE_SPMD", raising=False)
    return calls


@pytest.fixture
def engine(reduced: Any) -> XlaEngine:
    state = AcceleratorState(cpu=True, _from_accelerator=True)
    state.num_processes = WORLD
    gradient_state = GradientState(GradientAccumulationPlugin(num_steps=2))
    return XlaEngine(EngineContext(state, gradient_state, Handlers.sort([]), Prepared()))


def train(engine: XlaEngine, model: nn.Module, optimizer: Any, *, sync: bool, clips: bool = False) -> None:
    engine.gradient_state._set_sync_gradients(sync)
    model(torch.ones(2, 3)).sum().backward()
    if clips:
        engine.clip_grad_value_(model.parameters(), 1e6)
    optimizer.step()


def test_gradients_are_all_reduced_once_when_a_step_is_due(engine: XlaEngine, reduced: list[Any]) -> None:
    model = nn.Linear(3, 1)
    optimizer = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), device_placement=False)
    before = model.bias.item()
    train(engine, model, optimizer, sync=False, clips=True)
    assert reduced == []
    assert not engine.gradient_state.is_xla_gradients_synced
    train(engine, model, optimizer, sync=True, clips=True)
    assert len(reduced) == 1  # clipping did it, so stepping did not
    assert [tuple(tensor.shape) for tensor in reduced[0]] == [(1, 3), (1,)]
    assert before - model.bias.item() == pytest.approx(2 * 4)  # both micro-batches
    assert not engine.gradient_state.is_xla_gradients_synced
    optimizer.zero_grad()
    train(engine, model, optimizer, sync=True)
    assert len(reduced) == 2


def test_each_optimizers_gradients_are_averaged_by_themselves(engine: XlaEngine, reduced: list[Any]) -> None:
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    optimizers = [
        engine.prepare_optimizer(torch.optim.SGD(one.parameters()), device_placement=False) for one in models
    ]
    engine.gradient_state._set_sync_gradients(True)
    for model in models:
        model(torch.ones(2, 3)).sum().backward()
    engine.clip_grad_value_(models[1].parameters(), 1e6)
    optimizers[0].step()
    optimizers[1].step()
    assert len(reduced) == 2


def test_loaders_are_sharded_as_everywhere_and_means_over_tokens_are_refused(engine: XlaEngine) -> None:
    loader = DataLoader(TensorDataset(torch.ones(8)), batch_size=2)
    assert engine.start_loader(loader, DataLoaderConfiguration()) is loader
    with pytest.raises(ValueError, match="dispatch_batches=True"):
        engine.start_loader(loader, DataLoaderConfiguration(dispatch_batches=True))
    with pytest.raises(NotImplementedError, match="Use SPMD"):
        engine.mean_over_tokens(torch.ones(()), 3)


def test_fused_optimizers_step_all_the_same(engine: XlaEngine) -> None:
    optimizer = torch.optim.AdamW(nn.Linear(3, 1).parameters(), fused=True)
    engine.prepare_optimizer(optimizer, device_placement=False)
    assert optimizer.param_groups[0]["fused"] is False
