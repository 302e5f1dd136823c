"""Engines from outside: one that forgets what is fatal cannot be made, and one around another adds to it alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_integrations.engines.ddp import DDPEngine
from accel_integrations.engines.delegating import DelegatingEngine
from accel_integrations.engines.engine import Engine, EngineContext
from accel_integrations.engines.registry import ENGINES
from accel_ops.collectives.tensors import gather
from accelerate import Accelerator
from tests.support.ranks import ranks

ROOT = Path(__file__).resolve().parents[2]


class Counting(DelegatingEngine):
    """DDP, and counts its steps."""

    name = "counting"
    num_steps = 0

    def __init__(self, context: EngineContext) -> None:
        super().__init__(DDPEngine(context))

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        self.num_steps += 1
        return self.inner.step(optimizer, closure)


class Incomplete(Engine):
    """Says how models are prepared, and nothing about gradients."""

    name = "incomplete"

    def prepare_model(self, model: nn.Module, *, evaluation: bool = False, device_placement: bool = True) -> nn.Module:
        return model


def test_an_engine_that_forgets_its_gradients_cannot_be_made_and_one_around_another_forgets_nothing() -> None:
    with mock.patch.dict(ENGINES, {"NO": f"{__name__}:Incomplete"}), pytest.raises(TypeError, match="num_averaged"):
        Accelerator(cpu=True)
    left = {name for name in vars(Engine) if not name.startswith("_")} - set(vars(DelegatingEngine))
    assert not left
    assert not DelegatingEngine.__abstractmethods__


@ranks(2)
def test_ranks_train_one_model_and_save_it(rank: int, world: int, tmp_path: Any) -> None:
    with mock.patch.dict(ENGINES, {"MULTI_CPU": f"{__name__}:Counting"}):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    engine: Any = accelerator.engine
    torch.manual_seed(rank)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((2, 3), float(rank + step))).mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert engine.num_steps == 2
    assert (engine.is_replicated, engine.num_averaged, engine.accumulates_in_grad) == (True, 2, True)
    first, second = gather(model.module.weight.detach()).chunk(2)
    assert torch.equal(first, second)
    accelerator.save_state(tmp_path / "state")
    before = model.module.weight.detach().clone()
    nn.init.zeros_(model.module.weight)
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model.module.weight, before)


def documented_engine() -> Any:
    """The class in docs/architecture.md."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    (code,) = [block for block in re.findall(r"```py\n(.*?)```", page, re.DOTALL) if "class AveragingEngine" in block]
    names: dict[str, Any] = {}
    exec(code, names)
    return names["AveragingEngine"]


@ranks(2)
def test_the_engine_of_the_documentation_averages_weights_and_loses_none(
    rank: int, world: int, tmp_path: Path
) -> None:
    accelerator = Accelerator(cpu=True, engine=documented_engine())
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    weight = model[0].weight.detach()

    def are_equal() -> bool:
        every: torch.Tensor = gather(weight[None])
        return torch.equal(every[0], every[1])

    equal = [are_equal()]
    for _ in range(13):
        accelerator.backward((model(torch.randn(8, 4)) - rank).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        equal.append(are_equal())
    assert [step for step, is_equal in enumerate(equal) if is_equal] == [0, 10]
    mean = gather(weight[None]).mean(dim=0)
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(model, tmp_path / "model")
    torch.testing.assert_close(accelerator.get_state_dict(model)["0.weight"], mean)
    assert not are_equal(), "saving changes no weights"
    accelerator.load_state(tmp_path / "state")
    torch.testing.assert_close(weight, mean)
    torch.testing.assert_close(load_file(tmp_path / "model" / "model.safetensors")["0.weight"], mean)
