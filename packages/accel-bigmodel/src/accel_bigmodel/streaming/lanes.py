"""Copies of blocks from CPU memory or files to a device, overlapped with its compute: one kind of lane per device.

A lane is a stream of copies: a CUDA stream (or another accelerator's), or a thread where the CPU itself computes.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from typing_extensions import override

from accel_bigmodel.streaming.arena import Region
from accel_bigmodel.streaming.pinned import may_pin, pinned
from accel_bigmodel.streaming.units import Block, UnitWeight

NUM_STAGES = 3  # pinned buffers in which weights from files are staged for one copy


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of one copy of a block.

    Args:
        moved_seconds: Duration of the copy.
        waited_seconds: How long compute was stalled by it.
    """

    moved_seconds: float
    waited_seconds: float


class Lane(ABC):
    """A stream of copies to one device. Its methods are called by the thread that computes.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __reduce__(self) -> Any:
        return type(self), (self.device,)  # a copy has threads, events and buffers of its own

    @abstractmethod
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory on the device (uint8, one dimension)."""

    @abstractmethod
    def begin(self, block: Block, region: Region) -> Any:
        """Start copying a block into a region; returns a handle of the copy (the arrival) for the methods below."""

    @abstractmethod
    def settle(self, arrival: Any) -> None:
        """Return once the copy is enqueued, so that no later one can overtake it."""

    @abstractmethod
    def wait(self, arrival: Any) -> None:
        """Make all compute that is enqueued from now on wait for the block."""

    @abstractmethod
    def mark(self, before: list[Any]) -> list[Any]:
        """Events recorded after everything that was enqueued so far; earlier ones are reused."""

    def start_timing(self) -> None:
        """Measure the copies that begin from now on; a lane whose clock costs nothing measures all of them."""

    @abstractmethod
    def timing(self, arrival: Any) -> Timing | None:
        """Durations of a copy that was waited for; None if it was not measured."""


def fill(weights: Iterable[UnitWeight], target: torch.Tensor) -> None:
    """Pack weights into one buffer, each in its final dtype.

    Args:
        weights: The weights to copy, each to its own offset.
        target: The block's bytes in CPU memory (uint8, one dimension).
    """
    with torch.no_grad():
        for weight in weights:
            weight.view(target).copy_(weight.source.detach())


def _helper_of(owner: object) -> Callable[..., Future[Any]]:
    """The `submit` of a thread that runs one task after the other and ends with its owner."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="weights")
    weakref.finalize(owner, pool.shutdown, wait=False)
    return pool.submit


@dataclass(slots=True)
class _Filling:
    """A block that a thread converts, and the durations of that."""

    done: Future[float]
    waited_seconds: float = 0.0


class ThreadLane(Lane):
    """The lane of the CPU itself, for weights stored in another dtype: a thread converts them in advance."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._submit = _helper_of(self)

    @override
    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    @override
    def begin(self, block: Block, region: Region) -> _Filling:
        """Have the thread convert the weights."""
        return _Filling(self._submit(_timed_fill, list(block.weights), region.memory))

    @override
    def settle(self, arrival: _Filling) -> None:
        """Nothing to do: one thread keeps the order."""

    @override
    def wait(self, arrival: _Filling) -> None:
        """Wait for the thread."""
        begin = time.perf_counter()
        arrival.done.result()
        arrival.waited_seconds = time.perf_counter() - begin

    @override
    def mark(self, before: list[Any]) -> list[Any]:
        """No events: a CPU runs synchronously."""
        return []

    @override
    def timing(self, arrival: _Filling) -> Timing:
        """Durations as measured by this process's clock."""
        return Timing(arrival.done.result(), arrival.waited_seconds)


def _timed_fill(weights: list[UnitWeight], target: torch.Tensor) -> float:
    begin = time.perf_counter()
    fill(weights, target)
    return time.perf_counter() - begin


@dataclass(slots=True)
class _Copying:
    """An asynchronous copy: an event at its end, and events that measure it if somebody asked for that."""

    ended: Any
    clock: _Clock | None
    enqueued: Future[None] | None = None  # when a thread has to pack or stage the block first


@dataclass(slots=True)
class _Clock:
    """Timing events before a copy, and around the wait for it."""

    begun: Any
    wait_begun: Any
    wait_ended: Any


class StreamLane(Lane):
    """The lane of an accelerator: copies from pinned memory on a CUDA stream of its own, overlapped with compute.

    Weights in CPU memory are packed into pinned memory once, block by block, and take one copy from then on; those in
    files, and those for which there is not memory enough to pin, are staged in one of a few pinned buffers each time. A
    thread does both.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._submit = _helper_of(self)
        self._stages: list[_Stage] = []
        self._addresses: set[int] = set()  # of packed weights
        self._is_timed = False

    @cached_property
    def _module(self) -> Any:
        return torch.get_device_module(self.device)

    @cached_property
    def _index(self) -> Any:
        """What torch's functions understand faster than a device."""
        return self.device if self.device.index is None else self.device.index

    @cached_property
    def _stream(self) -> Any:
        """Created by the first copy, so that a model can be unpickled where its device is missing."""
        return self._module.Stream(device=self.device)

    @override
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory on the accelerator (uint8, one dimension).

        When it is freed, torch waits for copies that are under way before it gives the memory to anybody else.
        """
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        memory.record_stream(self._stream)
        return memory

    @override
    def begin(self, block: Block, region: Region) -> _Copying:
        """Enqueue the copy behind the last kernel that uses this memory."""
        clock = _Clock(*[self._event(timed=True) for _ in range(3)]) if self._is_timed else None
        arrival = _Copying(self._event(timed=self._is_timed), clock)
        marks = region.busy_until
        if region.begin is None:  # new memory, which the compute stream may have used for something else
            marks = self.mark([])
        if self._is_packed(block):
            assert block.packed is not None
            self._copy(block.packed, block, region.memory, marks, arrival)
        else:
            prepare = self._pack if block.is_in_memory and may_pin(block.num_bytes) else self._stage
            arrival.enqueued = self._submit(prepare, block, region.memory, marks, arrival)
        return arrival

    def _is_packed(self, block: Block) -> bool:
        """Whether all weights still are in the packed buffer; a program may have replaced some."""
        if block.packed is None:
            return False
        address, size = block.packed.data_ptr(), block.packed.numel()
        return all(
            weight.source.data_ptr() == address + weight.offset
            if weight.offset < size
            else weight.source.data_ptr() in self._addresses
            for weight in block.weights
            if weight.num_bytes
        )

    def _pack(self, block: Block, target: torch.Tensor, marks: list[Any], arrival: _Copying) -> None:
        """In the thread: pack the weights into pinned memory, replace them by views of it, and copy them."""
        # These are tied to weights packed before.
        tied = [weight for weight in block.weights if weight.source.data_ptr() in self._addresses]
        untied = [weight for weight in block.weights if weight not in tied]
        block.lay_out([*untied, *tied])
        block.packed = pinned(sum(weight.room for weight in untied), self.device, self._stream)
        fill(untied, block.packed)
        for weight in untied:
            if weight.num_bytes:
                value = _within(block.packed, weight)
                self._addresses.add(value.data_ptr())
                _replace(weight, value)
        self._copy(block.packed, block, target, marks, arrival)

    def _stage(self, block: Block, target: torch.Tensor, marks: list[Any], arrival: _Copying) -> None:
        """In the thread: stage weights in a pinned buffer and start copying them."""
        stage = self._next_stage(block.num_bytes)
        stage.sent.synchronize()
        fill(block.weights, stage.memory)
        self._copy(stage.memory[: block.num_bytes], block, target, marks, arrival)
        stage.sent.record(self._stream)

    def _next_stage(self, num_bytes: int) -> _Stage:
        if len(self._stages) == NUM_STAGES:
            stage = self._stages.pop(0)  # the least recently used one
            if stage.memory.numel() < num_bytes:
                stage.sent.synchronize()
                stage.memory = pinned(num_bytes, self.device, self._stream)
        else:
            stage = _Stage(pinned(num_bytes, self.device, self._stream), self._event())
        self._stages.append(stage)
        return stage

    def _copy(
        self, source: torch.Tensor, block: Block, target: torch.Tensor, marks: list[Any], arrival: _Copying
    ) -> None:
        # the device is set first: a helper thread that leaves a stream's context returns to GPU 0, and so takes memory there
        with self._module.device(self._index), self._module.stream(self._stream), torch.no_grad():
            for mark in marks:
                self._stream.wait_event(mark)
            if arrival.clock is not None:
                arrival.clock.begun.record(self._stream)
            target[: source.numel()].copy_(source, non_blocking=True)
            for weight in block.weights:
                if weight.offset >= source.numel() and weight.num_bytes:
                    weight.view(target).copy_(weight.source, non_blocking=True)
            arrival.ended.record(self._stream)

    @override
    def settle(self, arrival: _Copying) -> None:
        """Wait until the thread has enqueued the copy; the stream keeps the order of copies."""
        if arrival.enqueued is not None:
            arrival.enqueued.result()

    @override
    def wait(self, arrival: _Copying) -> None:
        """Make the compute stream wait for the copy."""
        self.settle(arrival)
        computing = self._module.current_stream(self._index)
        if arrival.clock is None:
            computing.wait_event(arrival.ended)
            return
        arrival.clock.wait_begun.record(computing)
        computing.wait_event(arrival.ended)
        arrival.clock.wait_ended.record(computing)

    @override
    def mark(self, before: list[Any]) -> list[Any]:
        """One event, recorded after all that is enqueued on the compute stream."""
        event = before[0] if before else self._event()
        event.record(self._module.current_stream(self._index))
        return [event]

    @override
    def start_timing(self) -> None:
        """Put timing events around the copies that begin from now on."""
        self._is_timed = True

    @override
    def timing(self, arrival: _Copying) -> Timing | None:
        """Durations between CUDA events."""
        clock = arrival.clock
        if clock is None:
            return None
        clock.wait_ended.synchronize()
        return Timing(
            clock.begun.elapsed_time(arrival.ended) / 1e3, clock.wait_begun.elapsed_time(clock.wait_ended) / 1e3
        )

    def _event(self, *, timed: bool = False) -> Any:
        return self._module.Event(enable_timing=timed)


def _within(packed: torch.Tensor, weight: UnitWeight) -> torch.Tensor:
    """A weight in a packed buffer, with a storage of its own: `torch.save` would write the storage of the whole block."""
    storage: Any = packed.untyped_storage()[weight.offset : weight.offset + weight.num_bytes]
    value: Any = torch.empty(0, dtype=weight.dtype)
    return value.set_(storage, 0, weight.source.shape)


def _replace(weight: UnitWeight, view: torch.Tensor) -> None:
    """Replace a weight by its view in pinned memory, under all its names."""
    assert weight.home is not None
    mapping, address = weight.home[0], weight.source.data_ptr()
    for name, tensor in mapping.items():
        if tensor.data_ptr() == address and tensor.shape == view.shape:
            mapping[name] = view
    weight.refresh()


@dataclass(slots=True)
class _Stage:
    """A pinned buffer, and an event recorded after the last copy from it."""

    memory: torch.Tensor
    sent: Any


def make_lane(device: torch.device) -> Lane | None:
    """The lane of a device; None when it cannot overlap copies with compute."""
    if device.type == "cpu":
        return ThreadLane(device)
    if device.type == "meta" or not hasattr(torch.get_device_module(device), "Stream"):
        return None
    return StreamLane(device)
