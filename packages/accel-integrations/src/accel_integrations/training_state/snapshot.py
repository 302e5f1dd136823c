"""What a checkpoint will hold, copied at one moment, so that it can be written while training changes the originals.

A `Snapshot` takes the place of the writer of files. What is written from it later are the same bytes that would have been written
at once: tensors that share memory do so in the copy, and what is one object is one object.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_integrations.training_state.interface import FileWriter
from accel_ops.collectives.agreement import Ranks
from accel_ops.files.serialization import for_safetensors
from accel_state.devices import device_kind

if TYPE_CHECKING:
    from accel_integrations.training_state.formats.shard_writing import ShardCopies


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
        # The slice keeps the chunk alive.
        storage: torch.UntypedStorage = self.memory.untyped_storage()[begin : begin + num_bytes]
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


ATOMS = frozenset({
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout,
})  # fmt: skip
"""Types of objects that never change."""


class Snapshot:
    """Takes the files of a checkpoint as copies of their objects.

    Args:
        folder: Where they are to be written.
        buffers: The memory for the copies.

    Attributes:
        adopted: Names of files that were written into the folder already.
    """

    def __init__(self, folder: Path, buffers: HostBuffers) -> None:
        self.folder = folder
        self._buffers = buffers
        self._files: list[tuple[str, Any, bool]] = []
        self._sharded: list[tuple[str, ShardCopies]] = []
        self._written: list[list[Any]] = []
        self.adopted: list[str] = []

    def save(self, name: str, obj: Any, safe_serialization: bool = False) -> None:
        """Copy the object of one file.

        Raises:
            TypeError: A safetensors file cannot hold it.
        """
        if safe_serialization:
            tensors = for_safetensors(obj)
            copied: Any = {key: copy_values(tensor, self._buffers) for key, tensor in tensors.items()}
        else:
            copied = StateCopy(self._buffers).of(obj)
        self._files.append((name, copied, safe_serialization))

    def save_sharded(self, name: str, state: dict[str, Any]) -> None:
        """Copy this rank's shards of a state; all ranks call this, and plan together which of them writes what."""
        from accel_integrations.training_state.formats.shard_writing import ShardCopies

        copies = ShardCopies(self.folder, name, state, lambda tensor: copy_values(tensor, self._buffers))
        self._sharded.append((name, copies))

    def adopt(self, names: Iterable[str]) -> None:
        """Note files that were written into the folder already."""
        self.adopted.extend(names)

    def write_shards(self, ranks: Ranks) -> None:
        """Write the shards, and exchange what each rank wrote.

        Args:
            ranks: The processes, which agree without collectives.

        Raises:
            Exception: On all processes, when one could not.
        """
        for name, copies in self._sharded:
            self._written.append(ranks.together(f"write its shards of {name}", copies.write))

    def write(self, files: FileWriter) -> None:
        """Write everything else, and drop the copies."""
        for (_, copies), results in zip(self._sharded, self._written, strict=True):
            files.adopt(copies.complete(results))
        self._sharded.clear()
        files.adopt(self.adopted)
        while self._files:
            name, obj, safe_serialization = self._files.pop(0)
            files.save(name, obj, safe_serialization)


def copy_values(tensor: torch.Tensor, buffers: HostBuffers) -> torch.Tensor:
    """A contiguous copy of a dense tensor of any shape, dtype and device in a buffer."""
    shape, dtype = tensor.shape, tensor.dtype
    storage = buffers.take(tensor.numel() * tensor.element_size(), tensor.device)
    copied = torch.empty(0, dtype=dtype).set_(storage).view(shape)
    with torch.no_grad():
        return copied.copy_(tensor, non_blocking=tensor.device.type in PINNING_DEVICES)


class StateCopy:
    """The copy of one nested state, for `torch.save`.

    Args:
        buffers: The memory for the contents of tensors.
    """

    def __init__(self, buffers: HostBuffers) -> None:
        self._buffers = buffers
        self._copies: dict[int, Any] = {}  # by id; also the memo of `copy.deepcopy`
        self._storages: dict[int, torch.UntypedStorage] = {}

    def of(self, value: Any) -> Any:
        """The copy of a value that belongs to the state."""
        kind = type(value)
        if kind in ATOMS:
            return value
        if id(value) in self._copies:
            return self._copies[id(value)]
        if kind is dict or kind is OrderedDict:
            copied: Any = kind()
            self._copies[id(value)] = copied
            copied.update((self.of(key), self.of(inner)) for key, inner in value.items())
            if kind is OrderedDict and vars(value):  # `_metadata` of state dicts
                vars(copied).update(self.of(vars(value)))
        elif kind is list:
            copied = self._copies[id(value)] = []
            copied.extend(map(self.of, value))
        elif kind is tuple:
            copied = tuple(map(self.of, value))
            if all(new is old for new, old in zip(copied, value, strict=True)):
                copied = value
        elif kind in (torch.Tensor, torch.nn.Parameter) and _has_plain_memory(value):
            copied = self._tensor(value)
        else:
            copied = copy.deepcopy(value, self._copies)
        self._copies[id(value)] = copied
        return copied

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of any shape over a copy of all memory that it is a view of, as `torch.save` writes it."""
        if tensor.device.type != "cpu" and tensor.device.type not in PINNING_DEVICES:
            copied = tensor.detach().cpu()  # new memory already
        elif tensor.is_conj():
            copied = self._tensor(tensor.detach().conj()).conj()
        else:
            storage = self._storage(tensor.untyped_storage())
            copied = torch.empty(0, dtype=tensor.dtype)
            copied.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(copied, tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)

    def _storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if (host_storage := self._storages.get(storage._cdata)) is not None:
            return host_storage
        copied = self._buffers.take(storage.nbytes(), storage.device)
        self._storages[storage._cdata] = copied
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        target = torch.empty(0, dtype=torch.uint8).set_(copied)
        target.copy_(source, non_blocking=storage.device.type in PINNING_DEVICES)
        return copied


def _has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than a view of memory with values in it."""
    return (
        tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_neg())
        and not vars(tensor)
    )
