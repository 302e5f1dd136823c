"""Copies from mapped files to an accelerator, at the speed of its bus."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch

BUFFER_BYTES = 1 << 24
SMALL_BYTES = 1 << 20  # which the driver copies well by itself


class Lane(Protocol):
    """A page-locked buffer, from which an accelerator fetches on its own while the next one is filled."""

    buffer: torch.Tensor

    def wait(self) -> None:
        """Until the buffer may be filled again."""

    def send(self, target: torch.Tensor) -> None:
        """Begin to copy the first bytes of the buffer."""


class CudaLane:
    """A lane to one CUDA device.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.Stream(device)
        self._sent = torch.cuda.Event()

    def wait(self) -> None:
        """Until the buffer may be filled again."""
        self._sent.synchronize()

    def send(self, target: torch.Tensor) -> None:
        """Begin to copy the first bytes of the buffer."""
        self._stream.wait_stream(torch.cuda.current_stream(target.device))  # on which its memory was used before
        with torch.cuda.stream(self._stream):
            target.copy_(self.buffer[: target.numel()], non_blocking=True)
            self._sent.record(self._stream)


class DeviceCopier:
    """Copies tensors to CUDA devices; each thread that uses it has two lanes to each device."""

    def __init__(self) -> None:
        self._here = threading.local()

    def copy(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor in main memory, on a device; it is there when this returns.

        Args:
            value: The tensor.
            device: A CUDA device.
        """
        if value.numel() * value.element_size() < SMALL_BYTES:
            return value.to(device, copy=True)
        made = torch.empty(value.shape, dtype=value.dtype, device=device)
        copy_by_lanes(value.contiguous(), made, self._lanes(device))
        return made

    def _lanes(self, device: torch.device) -> Sequence[Lane]:
        if not hasattr(self._here, "lanes"):
            self._here.lanes = {}
        lanes: dict[torch.device, Sequence[Lane]] = self._here.lanes
        if device not in lanes:
            lanes[device] = CudaLane(device), CudaLane(device)
        return lanes[device]


def copy_by_lanes(source: torch.Tensor, target: torch.Tensor, lanes: Sequence[Lane]) -> None:
    """Copy a contiguous tensor piece by piece, filling one lane while the others are under way."""
    source_bytes, target_bytes = (each.reshape(-1).view(torch.uint8) for each in (source, target))
    step = lanes[0].buffer.numel()
    for number, begin in enumerate(range(0, source_bytes.numel(), step)):
        lane = lanes[number % len(lanes)]
        piece = source_bytes[begin : begin + step]
        lane.wait()
        lane.buffer[: piece.numel()].copy_(piece)
        lane.send(target_bytes[begin : begin + step])
    for lane in lanes:
        lane.wait()
