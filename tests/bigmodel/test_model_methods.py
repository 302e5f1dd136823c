"""Methods that a dispatched model gets, and loses with its hooks."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_bigmodel import cpu_offload, dispatch_model
from accel_bigmodel.hooks.hook import ModelHook, add_hook_to_module, remove_hook_from_submodules
from accel_bigmodel.streaming.report import ReportMethod

INPUTS = torch.randn(2, 4)


def new_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "place",
    [
        lambda model, folder: dispatch_model(model, {"": "cpu"}),
        lambda model, folder: dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=folder),
        lambda model, folder: cpu_offload(model),
    ],
    ids=["on one device", "dispatched before", "offloaded before"],
)
@pytest.mark.usefixtures("collector_off")
def test_a_model_without_hooks_is_freed_by_its_last_reference(
    place: Callable[[nn.Module, Path], nn.Module], tmp_path: Path
) -> None:
    model = place(new_model(), tmp_path)
    model(INPUTS)
    remove_hook_from_submodules(model)
    model(INPUTS)
    there = weakref.ref(model)
    del model
    assert there() is None


def test_moving_is_as_ever_once_the_hooks_are_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = new_model()
    before = set(vars(model))
    for _ in range(2):
        dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=tmp_path)
    assert list(inspect.signature(model.to).parameters) == list(inspect.signature(new_model().to).parameters)
    remove_hook_from_submodules(model)
    assert set(vars(model)) - before == {"hf_device_map"}
    assert model.to(torch.float64)[0].weight.dtype == torch.float64  # type: ignore[index]
    assert not caplog.records


def test_a_method_of_the_model_itself_comes_back(tmp_path: Path) -> None:
    model = new_model()
    calls = []
    own = model.to = lambda *args, **kwargs: calls.append(args)  # type: ignore[assignment,method-assign]
    for _ in range(2):
        dispatch_model(model, {"": "cpu"}, force_hooks=True)
    add_hook_to_module(model, ModelHook(), append=True)
    assert model.to is not own, "a further hook leaves the methods"
    model.to("cpu")
    assert calls == [("cpu",)]
    remove_hook_from_submodules(model)
    assert model.to is own


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_methods_of_its_own(
    copied: Callable[[nn.Module], nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = dispatch_model(new_model(), {"0": "cpu", "1": "disk"}, offload_dir=tmp_path)
    expected = model(INPUTS)
    twin = copied(model)
    assert twin.to.model is twin
    assert twin.offload_report.model is twin  # type: ignore[union-attr]
    remove_hook_from_submodules(twin)
    assert twin.to("cpu") is twin
    assert torch.equal(twin(INPUTS), expected)
    with pytest.raises(RuntimeError, match="cannot be moved"):
        model.to("cpu")


def test_a_method_that_outlives_its_model_says_so() -> None:
    method = ReportMethod(new_model())
    gc.collect()
    with pytest.raises(ReferenceError, match="was deleted"):
        method()
