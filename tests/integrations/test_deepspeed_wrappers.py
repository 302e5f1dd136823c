"""What stands for a model, an optimizer and a scheduler of DeepSpeed, around an engine that only takes notes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    get_active_deepspeed_plugin,
    map_pytorch_optim_to_deepspeed,
)


class NotingEngine:
    """Writes down what it is asked to do, in the place of DeepSpeed's own engine."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.calls.append(("boundary", is_boundary))

    def backward(self, loss: Any, **options: Any) -> None:
        self.calls.append(("backward", loss, options))

    def step(self) -> None:
        self.calls.append("step")

    def get_global_grad_norm(self) -> torch.Tensor:
        return torch.tensor(2.5)


def test_the_engine_steps_where_a_window_ends() -> None:
    engine = NotingEngine()
    wrapper = DeepSpeedEngineWrapper(engine)
    wrapper.backward(1.0, sync_gradients=False)
    wrapper.backward(2.0, retain_graph=True)
    assert engine.calls == [
        ("boundary", False),
        ("backward", 1.0, {}),
        ("boundary", True),
        ("backward", 2.0, {"retain_graph": True}),
        "step",
    ]
    assert wrapper.get_global_grad_norm() == 2.5


def test_optimizer_and_scheduler_leave_stepping_to_the_engine() -> None:
    Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    wrapped = DeepSpeedOptimizerWrapper(optimizer)
    scheduler = DeepSpeedSchedulerWrapper(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1), wrapped)
    wrapped.step()
    wrapped.zero_grad()
    scheduler.step()
    assert weight.item() == 1
    assert weight.grad is not None
    assert scheduler.get_last_lr() == [0.5]
    assert wrapped.step_was_skipped is False
    assert DeepSpeedOptimizerWrapper(SimpleNamespace(overflow=True, state={})).step_was_skipped is True


def test_a_run_without_deepspeed_has_no_plugin_in_use() -> None:
    with pytest.raises(ValueError, match="No DeepSpeed plugin is in use.*'NO'"):
        get_active_deepspeed_plugin(Accelerator(cpu=True).state)


def test_unknown_optimizers_stay_as_they_are_and_settings_that_would_be_lost_are_refused() -> None:
    pytest.importorskip("deepspeed")
    parameters = [torch.nn.Parameter(torch.ones(1))]
    for optimizer in (torch.optim.SGD(parameters, lr=0.5), torch.optim.Adamax(parameters)):
        assert map_pytorch_optim_to_deepspeed(optimizer) is optimizer
    for setting in ("amsgrad", "maximize"):
        with pytest.raises(ValueError, match=f"{setting}=True.*zero_force_ds_cpu_optimizer"):
            map_pytorch_optim_to_deepspeed(torch.optim.AdamW(parameters, **{setting: True}))
