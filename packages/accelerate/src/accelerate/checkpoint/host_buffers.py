"""Memory of the host into which states are copied at each save, kept from one save to the next.

New memory costs more than the copy: the system zeroes each page when it is first touched. Pinned memory, from which and to which
accelerators copy at full speed, costs even more to get.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accel_state.devices import device_kind

CHUNK_BYTES = 64 << 20
ALIGNMENT = 64
PINNING_DEVICES = frozenset({"cuda", "xpu"})
"""Devices that copy to pinned memory without making the host wait."""


@dataclass(slots=True)
class _Chunk:
    memory: torch.Tensor
    used: int = 0

    @property
    def room(self) -> int:
        return self.memory.numel() - self.used

    def take(self, num_bytes: int) -> torch.UntypedStorage:
        begin = self.used
        self.used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        storage: torch.UntypedStorage = self.memory.untyped_storage()[
            begin : begin + num_bytes
        ]  # keeps the chunk alive
        return storage


class HostBuffers:
    """Host memory that is taken piece by piece, and again from the beginning after `begin`.

    The same requests in the same order get the same pieces.
    """

    def __init__(self) -> None:
        self._chunks: dict[str, list[_Chunk]] = {}  # by the type of device that copies into them
        self._devices: set[torch.device] = set()

    def begin(self) -> None:
        """Make all memory available again: nobody reads what was copied before."""
        for chunks in self._chunks.values():
            for chunk in chunks:
                chunk.used = 0

    def take(self, num_bytes: int, device: torch.device) -> torch.UntypedStorage:
        """Memory for something on a device.

        Args:
            num_bytes: Its size.
            device: Where it is copied from; pinned memory where that helps.

        Returns:
            A storage on the CPU of exactly this size, with undefined content.
        """
        pins = device.type in PINNING_DEVICES
        if pins:
            self._devices.add(device)
        chunks = self._chunks.setdefault(device.type if pins else "cpu", [])
        for chunk in chunks:
            if num_bytes <= chunk.room:
                return chunk.take(num_bytes)
        size = num_bytes + ALIGNMENT if num_bytes > CHUNK_BYTES // 4 else CHUNK_BYTES
        chunks.append(_Chunk(_pinned(size, device) if pins else torch.empty(size, dtype=torch.uint8)))
        return chunks[-1].take(num_bytes)

    def end(self) -> None:
        """Wait until all copies have arrived, and free what was not used this time."""
        for device in self._devices:
            device_kind(device.type).module().synchronize(device)
        self._devices.clear()
        for chunks in self._chunks.values():
            chunks[:] = [chunk for chunk in chunks if chunk.used]


def _pinned(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Pinned memory; pageable memory where so much of it would leave too little for others."""
    from accel_bigmodel.streaming.pinned import may_pin, pinned

    if not may_pin(num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)
    return pinned(num_bytes, device, device_kind(device.type).module().current_stream(device))
