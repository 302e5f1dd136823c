"""Copies from mapped files to an accelerator through pinned buffers, at the speed of the bus."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch

BUFFER_BYTES = 1 << 24
SMALL_BYTES = 1 << 20  # which the driver copies well by itself


class StagingBuffer(Protocol):
    """A pinned buffer that a device copies from asynchronously, while the next one is filled."""

    buffer: torch.Tensor

    def wait(self) -> None:
        """Until the buffer may be filled again."""

    def send(self, target: torch.Tensor) -> None:
        """Begin to copy the first bytes of the buffer."""


class CudaStagingBuffer:
    """A pinned buffer that is copied to one CUDA device on a CUDA stream of its own.

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
    """Copies tensors to CUDA devices; each thread that uses it has two pinned buffers for each device."""

    def __init__(self) -> None:
        self._here = threading.local()

    def copy(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy a tensor in CPU memory to a device; the copy has ended when this returns.

        Args:
            value: The tensor.
            device: A CUDA device.
        """
        if value.numel() * value.element_size() < SMALL_BYTES:
            return value.to(device, copy=True)
        made = torch.empty(value.shape, dtype=value.dtype, device=device)
        copy_staged(value.contiguous(), made, self._buffers(device))
        return made

    def _buffers(self, device: torch.device) -> Sequence[StagingBuffer]:
        if not hasattr(self._here, "buffers"):
            self._here.buffers = {}
        buffers: dict[torch.device, Sequence[StagingBuffer]] = self._here.buffers
        if device not in buffers:
            buffers[device] = CudaStagingBuffer(device), CudaStagingBuffer(device)
        return buffers[device]


def copy_staged(source: torch.Tensor, target: torch.Tensor, buffers: Sequence[StagingBuffer]) -> None:
    """Copy a contiguous tensor piece by piece, filling one buffer while the others are copied."""
    source_bytes, target_bytes = (each.reshape(-1).view(torch.uint8) for each in (source, target))
    step = buffers[0].buffer.numel()
    for number, begin in enumerate(range(0, source_bytes.numel(), step)):
        staging = buffers[number % len(buffers)]
        piece = source_bytes[begin : begin + step]
        staging.wait()
        staging.buffer[: piece.numel()].copy_(piece)
        staging.send(target_bytes[begin : begin + step])
    for staging in buffers:
        staging.wait()
