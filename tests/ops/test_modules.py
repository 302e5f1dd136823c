"""Looking at modules and their tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accel_ops import modules
from accel_ops.tied import ensure_weights_retied


class Offloaded(torch.Tensor):
    """A DTensor whose shard is in CPU memory while its mesh is one of GPUs: a stand-in, because there are none here."""

    device_mesh = SimpleNamespace(device_type="cuda")
    moved: list[Any]

    def to(self, *where: Any, **_: Any) -> Any:  # type: ignore[override]
        self.moved.append(where)
        return SimpleNamespace(full_tensor=lambda: "gathered on the GPU")

    def full_tensor(self) -> Any:
        raise RuntimeError("No backend type associated with device type cpu")


def test_an_offloaded_shard_is_gathered_where_its_mesh_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.zeros(2).as_subclass(Offloaded)
    tensor.moved = []
    monkeypatch.setattr(modules, "to_local", lambda given: torch.zeros(1))
    assert modules.full_tensor(tensor) == "gathered on the GPU"
    assert tensor.moved == [("cuda",)]


def test_modules_are_given_or_named() -> None:
    model = nn.ModuleDict({"head": nn.Linear(1, 1), "heads": nn.Linear(1, 1)})
    assert modules.modules_among("head", model) == [model["head"]]
    assert modules.modules_among("head.*", model) == [model["head"], model["heads"]]
    assert modules.modules_among(iter([model["heads"]]), model) == [model["heads"]]
    assert modules.modules_among(None, model) == []


def test_a_function_that_makes_weights_is_left_alone_where_nothing_is_tied() -> None:
    def make(module: nn.Module) -> None:
        raise AssertionError("it is not called")

    assert ensure_weights_retied(make, nn.Linear(1, 1), "cpu") is make
