"""Copies of tensors in files to CUDA devices: threads read into pinned buffers, from which the devices copy meanwhile.

Large tensors are split, so that all threads work until the end. Files are read into the buffers, because copying from a
memory-mapped file has to map its pages first, which takes CPU time and locks that the threads share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from accel_bigmodel.checkpoint.contents import ByteSource

NUM_READERS = 12  # a PCIe 5 bus takes 56 GB/s, and one core reads about a tenth of that from the page cache
SLICE_BYTES = 1 << 24  # read by one thread
BUFFER_BYTES = 1 << 22  # pinning memory takes longer than copying it, so there is little of it
NUM_BUFFERS = 2  # of each thread


class StagingBuffer(Protocol):
    """A pinned buffer that a device copies from asynchronously, while the next one is filled."""

    memory: torch.Tensor

    def wait(self) -> None:
        """Block until the buffer may be filled again."""

    def send(self, target: torch.Tensor) -> None:
        """Start copying the first bytes of the buffer to a target (uint8, one dimension)."""


class PinnedBuffer:
    """A pinned buffer that is copied on the current CUDA stream of its thread."""

    def __init__(self) -> None:
        self.memory = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self._sent: Any = None

    def wait(self) -> None:
        """Block until the buffer may be filled again."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, target: torch.Tensor) -> None:
        """Start copying the first bytes of the buffer to a target (uint8, one dimension)."""
        target.copy_(self.memory[: target.numel()], non_blocking=True)
        self._sent = torch.cuda.current_stream().record_event()


def copy_staged(
    read_into: Callable[[torch.Tensor, int], None], target: torch.Tensor, buffers: Iterator[StagingBuffer]
) -> None:
    """Fill one buffer after the other and start copying it; the last copies may still run when this returns.

    Args:
        read_into: Fills a tensor (uint8, one dimension) with the bytes from an offset on.
        target: Gets all bytes (uint8, one dimension).
        buffers: Yields the buffers in turn.
    """
    begin = 0
    while begin < target.numel():
        staging = next(buffers)
        staging.wait()
        num_bytes = min(staging.memory.numel(), target.numel() - begin)
        read_into(staging.memory[:num_bytes], begin)
        staging.send(target[begin : begin + num_bytes])
        begin += num_bytes


class DeviceCopier:
    """Copies tensors to CUDA devices; each thread has a stream for each device, and two pinned buffers.

    Args:
        readers: The threads.
    """

    def __init__(self, readers: ThreadPoolExecutor) -> None:
        self._readers = readers
        self._here = threading.local()
        self._streams: list[Any] = []  # of all threads

    def start(self, source: ByteSource, target: torch.Tensor) -> Sequence[Future[Any]]:
        """Start copying a tensor.

        Args:
            source: Its bytes.
            target: A contiguous tensor on a CUDA device.

        Returns:
            Futures of CUDA events; the target has its values when they have completed.
        """
        flat = target.detach().reshape(-1).view(torch.uint8)
        free = torch.cuda.current_stream(target.device).record_event()  # what used this memory before has ended then
        slices = range(0, flat.numel(), SLICE_BYTES)
        return [
            self._readers.submit(self._copy, source, begin, flat[begin : begin + SLICE_BYTES], free)
            for begin in slices
        ]

    def _copy(self, source: ByteSource, begin: int, target: torch.Tensor, free: Any) -> Any:
        """In a thread: copy the bytes from `begin` on; returns an event."""
        source.read_ahead(begin, target.numel())
        with torch.cuda.device(target.device):  # also for pinned memory: the thread's own device is GPU 0
            stream = self._stream(target.device)
            with torch.cuda.stream(stream):
                stream.wait_event(free)
                copy_staged(
                    lambda buffer, offset: source.read_into(buffer, begin + offset), target, self._own_buffers()
                )
                return stream.record_event()

    def _stream(self, device: torch.device) -> Any:
        streams: dict[torch.device, Any] = self._here.__dict__.setdefault("streams", {})
        if device not in streams:
            streams[device] = torch.cuda.Stream(device)
            self._streams.append(streams[device])
        return streams[device]

    def _own_buffers(self) -> Iterator[StagingBuffer]:
        """The buffers of this thread in turn, the one that was sent first at first."""
        buffers: list[StagingBuffer] = self._here.__dict__.setdefault("buffers", [])
        while True:
            buffers.append(buffers.pop(0) if len(buffers) == NUM_BUFFERS else PinnedBuffer())
            yield buffers[-1]

    def synchronize(self) -> None:
        """Wait until all copies that were started have ended; no thread may be starting more."""
        for stream in self._streams:
            stream.synchronize()


__all__ = ["DeviceCopier", "copy_staged"]
