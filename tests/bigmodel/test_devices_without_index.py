"""`"cuda"` is the current GPU, also in maps and hooks; tensors are fake, because there is no GPU here."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accel_bigmodel import cpu_offload_with_hook
from accel_bigmodel.device_map.check import bytes_to_move, check_tied_parameters_on_same_device
from accel_bigmodel.dispatch import _offloaded_places
from accel_bigmodel.hooks.user_offload import CpuOffload
from accel_bigmodel.weights.contents import CheckpointContents
from accel_bigmodel.weights.placing import LoadOptions, _place


@pytest.fixture
def model_on_gpu() -> nn.Module:
    model = nn.Linear(2, 2, device="meta")
    with FakeTensorMode():  # without initial values: torch 2.9 would ask the driver for them
        model.weight, model.bias = (nn.Parameter(torch.empty(*shape, device="cuda:3")) for shape in ((2, 2), (2,)))
    return model


@pytest.fixture
def current_gpu(model_on_gpu: nn.Module, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    return 3


def test_a_model_that_is_there_needs_no_room(model_on_gpu: nn.Module, current_gpu: int) -> None:
    assert bytes_to_move(model_on_gpu, {"": "cuda"}) == {}
    elsewhere = bytes_to_move(nn.Linear(2, 2), {"": "cuda"})
    assert elsewhere == {torch.device("cuda", 3): 24}


def test_weights_go_to_the_gpu_of_this_process_whichever_thread_copies_them(current_gpu: int) -> None:
    class Contents:
        source = "model.safetensors"

        def dtype_and_shape(self, name: str) -> Any:
            return torch.float32, (2, 2)

    contents: CheckpointContents = Contents()  # type: ignore[assignment]
    options = LoadOptions(device_map={"": "cuda"})
    placement = _place("weight", "weight", torch.empty(2, 2), contents, options, assign=True)
    assert placement.device == torch.device("cuda", 3)


def test_a_model_that_is_on_the_gpu_does_not_push_the_one_before_it_off(
    model_on_gpu: nn.Module, current_gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, before = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    offloaded: list[str] = []
    monkeypatch.setattr(before, "offload", lambda: offloaded.append("the one before"))
    monkeypatch.setattr(model_on_gpu, "to", lambda device: model_on_gpu)
    CpuOffload("cuda", before).pre_forward(model_on_gpu)
    assert offloaded == []
    CpuOffload("cuda:1", before).pre_forward(model_on_gpu)
    assert offloaded == ["the one before"]


def test_tied_parameters_on_one_device_by_two_names_are_on_the_same_one(
    current_gpu: int, caplog: pytest.LogCaptureFixture
) -> None:
    tied = [["embed.weight", "head.weight"]]
    for places in (["cuda", 3], ["cuda:3", torch.device("cuda")], ["cpu", torch.device("cpu")], ["disk", "disk"]):
        check_tied_parameters_on_same_device(tied, dict(zip(["embed", "head"], places, strict=True)))
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        check_tied_parameters_on_same_device(tied, {"embed": "cuda", "head": 1})
    assert "several devices" in caplog.text


@pytest.mark.parametrize(
    ("main_device", "places"),
    [
        ("mps", ("disk",)),
        ("mps:0", ("disk",)),
        (torch.device("mps"), ("disk",)),
        (torch.device("cpu"), ("disk",)),
        ("cuda", ("cpu", "disk")),
        (0, ("cpu", "disk")),
    ],
)
def test_what_is_offloaded_depends_on_the_kind_of_device(main_device: Any, places: tuple[str, ...]) -> None:
    assert _offloaded_places(main_device) == places
