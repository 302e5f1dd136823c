"""Training that runs, but not as it was meant, is warned of once."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

from accel_ops.placement import send_to_device
from accelerate import Accelerator, PartialState, gathering
from tests.support.ranks import POOL


def two_steps(accelerator: Accelerator, model: Any, optimizer: Any, backward: Callable[[Any], None]) -> list[str]:
    """Two optimizer steps; returns the warnings."""
    with warnings.catch_warnings(record=True) as actual:
        warnings.simplefilter("always")
        for _ in range(2 * accelerator.gradient_accumulation_steps):
            with accelerator.accumulate(getattr(model, "__self__", model)):
                backward(model(torch.full((2, 3), 1.0 + accelerator.process_index)).mean())
                optimizer.step()
                optimizer.zero_grad()
    return [str(warning.message) for warning in actual]


def test_right_programs_are_not_warned() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(3, 1)
    model.bias.requires_grad_(False)
    temperature = nn.Parameter(torch.ones(()))  # one process needs not to average it
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert two_steps(accelerator, model, optimizer, lambda loss: accelerator.backward(loss * temperature)) == []
    Accelerator(cpu=True, gradient_accumulation_steps=2)


def test_an_optimizer_of_another_model() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    model, optimizer = accelerator.prepare(model, optimizer)
    (message,) = two_steps(accelerator, model, optimizer, accelerator.backward)
    assert "SGD updates 2 of 2 parameters that no prepared model holds (of shape [1, 3], [1])" in message


def test_gradients_that_are_summed_instead_of_averaged() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (message,) = two_steps(accelerator, model, optimizer, lambda loss: loss.backward())
    assert "accelerator.backward() was never called: gradients of 2 micro-batches are summed" in message


def test_an_optimizer_that_was_not_prepared_steps_in_every_micro_batch() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare(model)
    (message,) = two_steps(accelerator, model, optimizer, accelerator.backward)
    assert "SGD was not prepared, and steps in every micro-batch, not only at the end of each 4" in message
    assert "Pass it to prepare()" in message


def test_an_optimizer_that_was_not_prepared_and_trains_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    model = accelerator.prepare(model)
    (message,) = two_steps(accelerator, model, optimizer, accelerator.backward)
    assert "SGD was not prepared, and none of its parameters has a gradient" in message


def test_an_optimizer_that_was_not_prepared_steps_with_scaled_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator.engine.precision, "scaler", torch.amp.GradScaler("cpu"), raising=False)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare(model)
    (message,) = two_steps(accelerator, model, optimizer, accelerator.backward)
    assert "SGD was not prepared, and steps with gradients that are multiplied by the loss scale" in message


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer, as libraries write them: nothing of torch's class is set up."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self) -> None:
        self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad()


def test_unprepared_optimizers_that_are_right_are_not_warned_of() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, other = accelerator.prepare(nn.Linear(3, 1)), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    second = torch.optim.SGD(other.parameters(), lr=0.1)  # of a model that the program trains itself
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward((model(torch.ones(2, 3)) + other(torch.ones(2, 3))).mean())
                second.step()
                if accelerator.sync_gradients:
                    optimizer.step()
                    optimizer.zero_grad()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(3, 1))
    accelerator.backward(model(torch.full((2, 3), 1.0 + accelerator.process_index)).mean())
    watching = accelerator._stepping.first_step._unprepared
    assert watching is not None
    assert pickle.loads(pickle.dumps(watching)) is None


def test_an_optimizer_inside_a_prepared_one_is_not_warned_of() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(3, 1)
    optimizer = accelerator.prepare_optimizer(Lookahead(torch.optim.SGD(model.parameters(), lr=0.1)))
    assert two_steps(accelerator, accelerator.prepare(model), optimizer, accelerator.backward) == []


def test_an_accelerator_may_be_collected_while_an_optimizer_steps() -> None:
    held: list[Any] = []

    def collect(*_: Any) -> None:
        held.clear()
        gc.collect()

    hook = register_optimizer_step_pre_hook(collect)
    try:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(3, 1))
        accelerator.backward(model(torch.ones(2, 3)).mean())
        collected = weakref.ref(accelerator)
        held += [accelerator, model]
        del accelerator, model
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
        assert collected() is None
    finally:
        hook.remove()


def test_backward_after_memory_was_freed_is_seen() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.free_memory()
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert two_steps(accelerator, model, optimizer, accelerator.backward) == []


def test_an_optimizer_of_another_copy_of_the_model_is_seen() -> None:
    accelerator = Accelerator(cpu=True)
    model, copied = nn.Linear(3, 1), nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(copied.parameters(), lr=0.1))
    (message,) = two_steps(accelerator, model, optimizer, accelerator.backward)
    assert "SGD updates 2 of 2 parameters that no prepared model holds (of shape [1, 3], [1])" in message


def test_hooks_of_the_program_on_an_optimizer_run() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    calls: list[Any] = []
    optimizer.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    assert two_steps(accelerator, model, optimizer, accelerator.backward) == []
    assert calls == ["before", "after"] * 2


def test_a_second_accelerator_with_other_accumulation() -> None:
    first = Accelerator(cpu=True, gradient_accumulation_steps=4)
    first.prepare(nn.Linear(3, 1))
    with pytest.warns(UserWarning, match="sets gradient_accumulation_steps=1 for all.*had 4"):
        Accelerator(cpu=True)


def test_objects_can_be_copied_before_their_first_step() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    copied = pickle.loads(pickle.dumps(optimizer))
    assert copied.param_groups[0]["lr"] == copy.deepcopy(optimizer).param_groups[0]["lr"] == 0.1


def on_two_ranks(world: int) -> None:
    """What several ranks are warned of besides."""
    accelerator = Accelerator(cpu=True)
    model, beside = nn.Linear(3, 1), nn.Parameter(torch.ones(()))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    (message,) = two_steps(accelerator, model, optimizer, accelerator.backward)
    assert "backward() is called on 2 processes, but no model was prepared" in message

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([*model.parameters(), beside], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    (message,) = two_steps(accelerator, model, optimizer, lambda loss: accelerator.backward(loss * beside))
    assert "SGD updates 1 of 3 parameters that no prepared model holds (of shape [])" in message
    assert "not averaged over processes" in message

    calls: list[Callable[[Any], Any]] = [
        lambda model: accelerator.unwrap_model(model),  # aside
        lambda model: pickle.loads(pickle.dumps(model)) and model,
        lambda model: model.forward,
    ]
    for call in calls:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = nn.Linear(3, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        messages = of_all_ranks(two_steps(accelerator, call(model), optimizer, accelerator.backward))
        assert len(messages) == (call is calls[0]), "by the rank that comes last"
        assert all("the prepared Linear was never called" in message for message in messages)
        assert (len(model._forward_pre_hooks) == 0) == (call is calls[1])

    on_two_ranks_without_loader(accelerator)


def of_all_ranks(messages: list[str]) -> list[str]:
    said: list[Any] = [None] * PartialState().num_processes
    torch.distributed.all_gather_object(said, messages)
    return [message for of_rank in said for message in of_rank]


def on_two_ranks_without_loader(accelerator: Accelerator) -> None:
    gathering._num_looked_at = 0  # by tests before this one
    data = TensorDataset(torch.arange(24.0).view(8, 3))

    def messages_of(prepares_loader: bool, prepares_model: bool) -> list[str]:
        model: Any = nn.Linear(3, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
        prepared = accelerator.prepare(model, optimizer)
        loader: Any = DataLoader(data, batch_size=2)
        model, optimizer = prepared if prepares_model else (model, optimizer)
        loader = accelerator.prepare(loader) if prepares_loader else loader
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for (rows,) in loader:
                accelerator.backward(model(rows).mean())
                optimizer.step()
                optimizer.zero_grad()
            for (rows,) in loader:
                accelerator.gather_for_metrics(rows)
        accelerator.free_memory()
        return of_all_ranks([str(warning.message) for warning in caught])

    assert messages_of(True, True) == []
    thrown_away = messages_of(True, False)
    assert len(thrown_away) == 1
    assert all("the prepared Linear was never called" in message for message in thrown_away)
    first, *others = sorted(messages_of(False, True))
    assert first.startswith("Processes train on the same batch"), "by the rank that comes last"
    assert len(others) == 2
    assert all("the same 2 results from each of 2 processes" in message for message in others)


on_two_ranks.body = on_two_ranks  # type: ignore[attr-defined]


def test_models_that_several_ranks_train_apart() -> None:
    POOL.run(on_two_ranks, 2, {}, 60)


class Proxy(torch.optim.Optimizer):
    """An optimizer around another one, which never called the constructor of its base class."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def test_an_optimizer_without_hooks_trains() -> None:
    accelerator = Accelerator(cpu=True)
    model: Any = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, Proxy(torch.optim.SGD(model.parameters(), lr=0.1)))
    before = model.weight.detach().clone()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_what_has_no_backward_pass_and_no_parameters_is_named() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    with pytest.raises(TypeError, match=r"got 0\.5 \(float\), which has no gradients"):
        accelerator.backward(0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"not a Linear\. Pass model\.parameters\(\)"):
        accelerator.clip_grad_norm_(model, 1.0)  # type: ignore[arg-type]


def test_what_prepare_returns_as_it_is_is_warned_of() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.warns(UserWarning, match="TensorDataset as it is"):
        accelerator.prepare(torch.utils.data.TensorDataset(torch.ones(2)))
    with pytest.warns(UserWarning, match="list with Linear as it is"):
        accelerator.prepare([torch.nn.Linear(2, 1), "a name"])
    assert accelerator.prepare(["a name"]) == ["a name"]


def test_a_log_before_the_trackers_start_is_warned_of_once(tmp_path: object) -> None:
    accelerator = Accelerator(cpu=True, log_with="local", project_dir=str(tmp_path))
    with pytest.warns(UserWarning, match=r"no tracker \(local\) has started"):
        accelerator.log({"loss": 1.0})
    accelerator.log({"loss": 1.0})
    Accelerator(cpu=True).log({"loss": 1.0})


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    name: str = ""


class Movable(Pair):
    def to(self, device: Any) -> Movable:
        return Movable(self.x.to(device), self.name)


def test_a_dataclass_that_stays_behind_is_named() -> None:
    with pytest.warns(UserWarning, match="Pair is a dataclass without a `to` method, so that its tensors stay on cpu"):
        send_to_device([Pair(torch.ones(2))], "meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert send_to_device({"a": Movable(torch.ones(2))}, "meta")["a"].x.device.type == "meta"
        batch = Pair(torch.ones(2))
        assert send_to_device(batch, "cpu") is batch
