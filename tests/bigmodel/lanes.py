"""Ways to a device that does not exist here: they behave as late, or as early, as a real one may."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from accel_bigmodel.streaming import lanes
from accel_bigmodel.streaming.arena import Region
from accel_bigmodel.streaming.lanes import Lane, StreamLane, ThreadLane, Timing, fill
from accel_bigmodel.streaming.report import offloading_hooks
from accel_bigmodel.streaming.settings import Streaming
from accel_bigmodel.streaming.stream import WeightStream
from accel_bigmodel.streaming.units import Block

CPU = torch.device("cpu")
NAN_BYTE = 0xFF


class LateLane(Lane):
    """Copies nothing before somebody waits for it, and destroys what was in the memory at once."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device)
        self.pending: list[tuple[Block, Region]] = []
        self.num_begun = 0
        self.num_waited = 0
        self.late: list[str] = []  # blocks that were asked for only when they were needed
        self.allocated_bytes: list[int] = []

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.allocated_bytes.append(num_bytes)
        return torch.full((num_bytes,), NAN_BYTE, dtype=torch.uint8)

    def begin(self, block: Block, region: Region) -> int:
        with torch.inference_mode(False), torch.no_grad():
            region.memory.fill_(NAN_BYTE)
        self.pending.append((block, region))
        self.num_begun += 1
        return self.num_begun

    def settle(self, arrival: int) -> None:
        """Copies keep their order."""

    def wait(self, arrival: int) -> None:
        if arrival == self.num_begun:
            self.late.append(self.pending[-1][0].name)
        while self.num_waited < arrival:
            block, region = self.pending.pop(0)
            fill(block.weights, region.memory)
            self.num_waited += 1

    def mark(self, before: list[Any]) -> list[Any]:
        return []

    def timing(self, arrival: int) -> Timing:
        return Timing(2.0, 1.0)


class _Event:
    """An event of a device that is always done."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.recorded = False

    def record(self, stream: Any = None) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        """It is done."""

    def elapsed_time(self, other: _Event) -> float:
        assert self.recorded
        assert other.recorded
        return 1.0


class _Stream:
    """A stream of a device that does everything at once."""

    def __init__(self, device: Any = None) -> None:
        """Nothing is needed."""

    def wait_event(self, event: _Event) -> None:
        """It has happened."""


class PromptDevice:
    """Stands for `torch.cuda`: no accelerator is here, so its copies are those of the CPU, and happen at once."""

    Stream = _Stream
    Event = _Event
    current: Any = None  # device
    copied_on: ClassVar[list[Any]] = []  # the current devices where a stream was entered

    @classmethod
    @contextmanager
    def device(cls, device: Any) -> Iterator[None]:
        cls.current, before = device, cls.current
        yield
        cls.current = before

    @classmethod
    @contextmanager
    def stream(cls, stream: _Stream) -> Iterator[None]:
        cls.copied_on.append(cls.current)
        yield

    @staticmethod
    def current_stream(device: Any) -> _Stream:
        return _Stream()


def prompt_lane(monkeypatch: pytest.MonkeyPatch) -> StreamLane:
    """The lane to an accelerator, with the CPU in the place of it."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: PromptDevice)
    monkeypatch.setattr(lanes, "pinned", lambda num_bytes, *_: torch.empty(num_bytes, dtype=torch.uint8))
    monkeypatch.setattr(PromptDevice, "copied_on", [])
    recorded: list[int] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(tensor.data_ptr()))
    lane = StreamLane(CPU)
    lane.recorded = recorded  # type: ignore[attr-defined]
    return lane


def stream_through(model: nn.Module, lane: Lane, settings: Streaming) -> WeightStream:
    """Let an offloaded model get its weights by a lane."""
    names = {hook: name for name, hook in offloading_hooks(model)}
    stream = WeightStream(lane, settings, names)
    for hook in names:
        hook.stream = stream
    return stream


__all__ = ["CPU", "LateLane", "PromptDevice", "ThreadLane", "prompt_lane", "stream_through"]
