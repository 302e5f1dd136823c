"""The prepared optimizer: everything of the wrapped one, but steps only at the end of a window."""

from __future__ import annotations

import copy
import pickle
import sys
import types
from typing import Any

import pytest
import torch

from accel_integrations.engines.deepspeed.wrappers import DeepSpeedOptimizerWrapper
from accel_integrations.prepared.optimizer import (
    AcceleratedOptimizer,
    is_lomo_optimizer,
    lomo_backward,
    patch_optimizer_step,
)
from accel_ops.placement import send_to_device
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import MissingLibraryError
from accel_state.gradient_state import GradientState
from tests.integrations.training import new_engine, new_model, prepare


def new_optimizer(**options: Any) -> tuple[AcceleratedOptimizer, torch.nn.Parameter]:
    parameter = torch.nn.Parameter(torch.ones(2))
    return AcceleratedOptimizer(torch.optim.SGD([parameter], lr=0.5, **options)), parameter


@pytest.fixture(autouse=True)
def run() -> None:
    new_engine()


def test_it_stands_alone_and_does_nothing_within_a_window() -> None:
    optimizer, parameter = new_optimizer()
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(parameter, torch.full((2,), 0.5))
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(parameter.grad, torch.zeros(2))
    optimizer.zero_grad()
    assert parameter.grad is None
    assert not optimizer.step_was_skipped
    parameter.grad = torch.ones(2)
    GradientState()._set_sync_gradients(False)
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(parameter, torch.full((2,), 0.5))
    assert torch.equal(parameter.grad, torch.ones(2))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_a_step_returns_the_loss_of_its_closure_as_the_wrapped_optimizer_does(kind: Any) -> None:
    def steps(prepares: bool) -> list[float]:
        model = new_model()
        plain = optimizer = kind(model.parameters(), lr=0.1)
        if prepares:
            _, optimizer = prepare(new_engine(), model, plain)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(2, next(model.parameters()).shape[-1])).square().mean()
            loss.backward()
            return loss

        return [float(optimizer.step(closure).detach()) for _ in range(3)]

    assert steps(prepares=True) == steps(prepares=False)


def test_it_is_an_optimizer_to_schedulers_and_libraries_and_what_is_assigned_goes_to_the_wrapped_one() -> None:
    optimizer, parameter = new_optimizer(momentum=0.9)
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    parameter.grad = torch.ones(2)
    optimizer.step()
    scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert optimizer.defaults["momentum"] == 0.9
    assert list(optimizer.state) == [parameter]
    other, second = new_optimizer(momentum=0.9)
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(other.state[second]["momentum_buffer"], torch.ones(2))
    extra = torch.nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [extra]})
    assert len(optimizer.param_groups) == 2
    assert "SGD" in repr(optimizer)
    for name, value in (("state", {}), ("param_groups", []), ("defaults", {"lr": 1})):
        setattr(optimizer, name, value)
        assert getattr(optimizer.optimizer, name) is value


def test_copies_step_by_themselves() -> None:
    engine = new_engine()
    model = new_model()
    _, optimizer = prepare(engine, model, torch.optim.SGD(model.parameters(), lr=0.5))
    for twin in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        parameter = twin.param_groups[0]["params"][0]
        before = parameter.detach().clone()
        parameter.grad = torch.ones_like(parameter)
        twin.step()
        torch.testing.assert_close(parameter, before - 0.5)


class Wrapped(torch.optim.Optimizer):
    """Steps another optimizer, as those do that change its gradients or steps."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        """Takes the step of the other one."""
        return self.optimizer.step(closure)


@pytest.mark.parametrize("wrappers", [0, 1, 2])
def test_schedule_free_optimizers_are_switched(wrappers: int) -> None:
    schedulefree = pytest.importorskip("schedulefree")
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer: Any = schedulefree.AdamWScheduleFree([parameter], lr=0.1)
    for _ in range(wrappers):
        optimizer = Wrapped(optimizer)
    optimizer = AcceleratedOptimizer(optimizer)
    optimizer.train()
    for _ in range(2):
        parameter.grad = torch.ones(2)
        optimizer.step()
    trained = parameter.detach().clone()
    optimizer.eval()
    assert not torch.equal(parameter, trained), "evaluation runs on averaged weights"
    optimizer.train()
    torch.testing.assert_close(parameter.detach(), trained)
    plain, _ = new_optimizer()
    plain.train()  # which has no such modes
    AcceleratedOptimizer(Wrapped(plain.optimizer)).eval()


def test_a_schedule_free_optimizer_within_deepspeed_is_pointed_out() -> None:
    class Partitioned(torch.optim.SGD):
        """Keeps weights of its own, as ZeRO does."""

    parameter = torch.nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([parameter], lr=0.1)
    outer: Any = Partitioned([parameter], lr=0.1)
    outer.optimizer = inner
    optimizer = DeepSpeedOptimizerWrapper(outer)
    optimizer.eval()  # nothing in there has such modes
    inner.eval = print  # type: ignore[attr-defined]
    with pytest.warns(
        UserWarning, match=r"eval\(\) has no effect: Partitioned keeps the weights that SGD would switch"
    ):
        optimizer.eval()


def test_a_scaler_of_the_users_own_is_used() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=0.5), scaler=scaler)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)  # puts a `step` on the instance
    for value, skipped in ((float("nan"), True), (2.0, False)):
        scaler.scale(torch.ones(1))
        parameter.grad = torch.full((2,), value)
        optimizer.step()
        assert optimizer.step_was_skipped is skipped
    assert scaler.get_scale() == 2.0
    assert torch.equal(parameter, torch.full((2,), 0.5))
    scheduler.step()


def test_old_helpers() -> None:
    optimizer, _ = new_optimizer()
    step = patch_optimizer_step(optimizer, lambda value: value + 1)
    assert not hasattr(optimizer, "_accelerate_step_called")
    assert step(2) == 3
    assert optimizer._accelerate_step_called  # type: ignore[attr-defined]
    moved = send_to_device({"a": [torch.ones(1)], "b": 3}, "meta")
    assert moved["a"][0].device.type == "meta"
    assert moved["b"] == 3


# ---- LOMO -------------------------------------------------------------------------------------------------------


@pytest.fixture
def lomo(monkeypatch: pytest.MonkeyPatch) -> type:
    module = types.ModuleType("lomo_optim")

    class Lomo(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})
            self.calls: list[tuple[float, float]] = []

        def fused_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
            self.calls.append((loss.item(), learning_rate))

    Lomo.__module__ = "lomo_optim"
    monkeypatch.setitem(sys.modules, "lomo_optim", module)
    return Lomo


def test_lomo_updates_in_backward_and_not_in_step(lomo: type) -> None:
    engine = new_engine()
    model = new_model()
    _, optimizer = prepare(engine, model, lomo(model.parameters()))
    assert is_lomo_optimizer(optimizer.optimizer)
    lomo_backward(torch.tensor(2.0), 0.1, [optimizer.optimizer])
    assert optimizer.optimizer.calls == [(2.0, 0.1)]
    optimizer.step()  # torch's own would raise
    assert not optimizer.step_was_skipped


def test_lomo_needs_a_rate_an_optimizer_and_its_library(lomo: type, monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    with pytest.raises(ValueError, match="learning_rate=None"):
        lomo_backward(torch.ones(()), None, [lomo(model.parameters())])
    monkeypatch.setattr("accel_integrations.prepared.optimizer.is_lomo_available", lambda: True)
    with pytest.raises(ValueError, match="SGD"):
        lomo_backward(torch.ones(()), 0.1, [torch.optim.SGD(model.parameters())])
    monkeypatch.setattr("accel_integrations.prepared.optimizer.is_lomo_available", lambda: False)
    with pytest.raises(MissingLibraryError, match="pip install lomo-optim"):
        lomo_backward(torch.ones(()), 0.1, [])


def test_steps_are_counted_in_cpu_memory_where_the_state_is_on_the_device() -> None:
    """Else every step of Adam would wait for the device once for each parameter."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    parameter.grad = None
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0] = moved = torch.nn.Parameter(
            parameter.to("meta")
        )  # the other device here
    optimizer.state[moved] = optimizer.state.pop(parameter)
    AcceleratorState._shared_state["device"] = torch.device("meta")
    AcceleratedOptimizer(optimizer)
    assert optimizer.state[moved]["exp_avg"].is_meta
    assert optimizer.state[moved]["step"].item() == 1
