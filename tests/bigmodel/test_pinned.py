"""Pinned memory: freed after the copies from it, bounded, and no clocks where nobody reads them.

There is no accelerator here: a stand-in notes what is called on it.
"""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from accel_bigmodel.dispatch import cpu_offload
from accel_bigmodel.streaming import pinned as pinned_memory
from accel_bigmodel.streaming.pinned import may_pin, pinned
from accel_bigmodel.streaming.report import ModuleReport, OffloadReport
from accel_bigmodel.streaming.settings import Streaming
from accel_bigmodel.streaming.stream import WeightStream
from tests.bigmodel.lanes import PromptDevice, prompt_lane, stream_through

X = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
PLENTY = 1 << 40


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is called on the stand-in for CUDA, in order: every range can be registered."""
    actual: list[str] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: actual.append("register") or 0,
        cudaHostUnregister=lambda _: actual.append("unregister"),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(pinned_memory, "_held_bytes", 0)
    return actual


def pin(num_bytes: int, calls: list[str]) -> torch.Tensor:
    """Pinned memory of the stand-in, whose copy stream notes when it is waited for."""
    return pinned(num_bytes, torch.device("cuda", 0), SimpleNamespace(synchronize=lambda: calls.append("synchronize")))


def offloaded_through_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, nn.Module, WeightStream]:
    """A model, the same one offloaded to a stand-in for an accelerator, and its stream."""
    plain = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    offloaded = cpu_offload(copy.deepcopy(plain), "cpu")
    return plain, offloaded, stream_through(offloaded, prompt_lane(monkeypatch), Streaming(2, 4096))


def available(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Let the system have so much memory available."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=num_bytes))


def test_pinned_memory_is_freed_after_the_copies_from_it(calls: list[str]) -> None:
    memory = pin(64, calls)
    view = memory[8:]
    storage = memory.untyped_storage()[8:16]
    del memory
    gc.collect()
    assert calls == ["register"], "a view still uses it"
    del view
    gc.collect()
    assert calls == ["register"], "a part of its storage still uses it"
    del storage
    gc.collect()
    assert calls == ["register", "synchronize", "unregister"]


def test_at_most_half_of_what_would_be_available_is_pinned(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, 1000)
    assert may_pin(500)
    assert not may_pin(501)
    held = pin(400, calls)
    available(monkeypatch, 600)  # what is pinned is available no more
    assert may_pin(100)
    assert not may_pin(101)
    del held
    gc.collect()
    assert may_pin(300)


@pytest.mark.parametrize(("num_bytes", "is_packed"), [(PLENTY, True), (100, False)])
def test_weights_are_staged_where_too_little_memory_can_be_pinned(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, is_packed: bool
) -> None:
    plain, offloaded, stream = offloaded_through_a_stand_in(monkeypatch)
    available(monkeypatch, num_bytes)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(offloaded(X), plain(X))
        assert {block.packed is not None for block in stream.blocks} == {is_packed}
        available(monkeypatch, PLENTY)
        for _ in range(2):
            assert torch.equal(offloaded(X), plain(X))
    assert all(block.packed is not None for block in stream.blocks), "once there is memory, it is used"


def test_copies_are_timed_once_a_report_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[bool] = []

    class Event(PromptDevice.Event):  # type: ignore[misc, valid-type, name-defined]
        def __init__(self, enable_timing: bool = False) -> None:
            super().__init__(enable_timing)
            timed.append(enable_timing)

    monkeypatch.setattr(PromptDevice, "Event", Event)
    plain, offloaded, _ = offloaded_through_a_stand_in(monkeypatch)
    available(monkeypatch, PLENTY)
    report: Any = offloaded.offload_report
    with torch.no_grad():
        for _ in range(3):
            offloaded(X)
        assert timed
        assert not any(timed)
        assert not report().blocks
        for _ in range(2):
            assert torch.equal(offloaded(X), plain(X))
    assert any(timed)
    assert report().blocks
    unknown = OffloadReport([ModuleReport("a", "cpu", "cuda:0", 4)], [])
    assert "copies to an accelerator are timed once a report was asked for" in unknown.verdict
