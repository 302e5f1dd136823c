"""Copies of tensors in files to CUDA devices: threads read into pinned buffers, from which the devices copy meanwhile.

Large tensors are split, so that all threads work until the end. Files are read into the buffers, because copying from a
memory-mapped file has to map its pages first, which takes CPU time and locks that the threads share.

A thread calls torch and the system as seldom as it can: each call gives up Python's lock and waits its turn among the others to
get it back. With slices of 16 MB, twelve threads fill a bus of 55 GB/s to a good half; with 1 MB, to a fourteenth.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from accel_bigmodel.weights.contents import ByteSource

NUM_READERS = 12  # a PCIe 5 bus takes 56 GB/s, and one core reads about a tenth of that from the page cache
MIN_SLICE_BYTES, MAX_SLICE_BYTES = 1 << 20, 1 << 24


@dataclass(slots=True)
class _Buffer:
    """Pinned memory of one thread, and the event at the end of the last copy from it."""

    memory: torch.Tensor
    sent: Any = None


class DeviceCopier:
    """Copies tensors to CUDA devices. Each thread reads slices into a pinned buffer; while it is copied, others read.

    Args:
        readers: The threads.
        num_bytes: How much will be copied in all. No more memory is pinned than that, since pinning takes as long as copying
            several times.
    """

    def __init__(self, readers: ThreadPoolExecutor, num_bytes: int) -> None:
        self._readers = readers
        self._slice_bytes = max(MIN_SLICE_BYTES, min(MAX_SLICE_BYTES, num_bytes // NUM_READERS))
        self._here = threading.local()
        self._streams: dict[torch.device, Any] = {}

    def start(self, source: ByteSource, target: torch.Tensor) -> Sequence[Future[Any]]:
        """Start copying a tensor.

        Args:
            source: Its bytes.
            target: A contiguous tensor on a CUDA device.

        Returns:
            Futures of CUDA events; the target has its values when they have completed.
        """
        stream = self._stream(target.device)
        stream.wait_stream(torch.cuda.current_stream(target.device))  # on which this memory was used before
        flat = target.detach().reshape(-1).view(torch.uint8)
        slices = range(0, flat.numel(), self._slice_bytes)
        return [
            self._readers.submit(self._copy, source, begin, flat[begin : begin + self._slice_bytes], stream)
            for begin in slices
        ]

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _copy(self, source: ByteSource, begin: int, target: torch.Tensor, stream: Any) -> Any:
        """In a thread: copy the bytes from `begin` on; returns an event."""
        # the device is set for pinned memory, too: the thread's own device is GPU 0
        with torch.cuda.device(target.device), torch.cuda.stream(stream):
            buffer = self._own_buffer()
            if buffer.sent is not None:
                buffer.sent.synchronize()
            filled = buffer.memory[: target.numel()]
            source.read_into(filled, begin)
            target.copy_(filled, non_blocking=True)
            buffer.sent = stream.record_event()
            return buffer.sent

    def _own_buffer(self) -> _Buffer:
        if not hasattr(self._here, "buffer"):
            self._here.buffer = _Buffer(torch.empty(self._slice_bytes, dtype=torch.uint8, pin_memory=True))
        buffer: _Buffer = self._here.buffer
        return buffer

    def synchronize(self) -> None:
        """Wait until all copies that were started have ended; no thread may be starting more."""
        for stream in self._streams.values():
            stream.synchronize()
