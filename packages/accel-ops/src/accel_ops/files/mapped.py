"""Memory-mapped safetensors files: their tensors are views that are read from the disk when they are used."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from accel_ops.files import pages
from accel_ops.files.safetensors_header import DTYPES, TensorHeader, check_layout, raise_damaged, read_header

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The header's entry of one tensor of a file.

    Args:
        dtype: The stored dtype.
        shape: Its shape.
        begin: Its first byte, counted from the start of the file.
        end: The byte behind its last one.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class MappedShard:
    """A safetensors file, verified and memory-mapped once.

    Its tensors may be written to: changes are private to this process (copy-on-write), and the file is not changed. They keep the
    mapping open. As with any mapping, the file must not be truncated or overwritten meanwhile; replacing it by another
    under its name is safe.

    Args:
        path: The file.

    Raises:
        ValueError: The file is damaged, truncated or not a safetensors file.
        OSError: It cannot be opened.

    Example:
        ```python
        shard = MappedShard("model.safetensors")
        {name: shard.tensor(name) for name in shard.names()}
        ```
    """

    def __init__(self, path: StrPath) -> None:
        self.path = os.fspath(path)
        header = read_header(self.path)
        self.metadata = header.metadata
        self._entries = {name: _entry(self.path, tensor) for name, tensor in header.tensors.items()}
        check_layout(self.path, header)
        self._storage = torch.UntypedStorage.from_file(self.path, shared=False, nbytes=header.file_bytes)

    def names(self) -> list[str]:
        """The names of its tensors, as its header lists them."""
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> TensorEntry:
        """The header's entry of a tensor.

        Raises:
            KeyError: The file has no tensor of this name.
        """
        try:
            return self._entries[name]
        except KeyError:
            raise KeyError(f"{self.path} holds no tensor {name!r}: it has {len(self._entries)} others") from None

    def dtype_and_shape(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of a tensor, as stored."""
        entry = self.entry(name)
        return entry.dtype, entry.shape

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in CPU memory, without a copy.

        Only a tensor that is not aligned to its item size is copied.
        """
        entry = self.entry(name)
        tensor: Any = torch.empty(0, dtype=entry.dtype)
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=entry.dtype)
        storage: Any = self._storage[entry.begin : entry.end]  # has the tensor's own address and length
        if entry.begin % entry.dtype.itemsize:
            storage = storage.clone()
        tensor.set_(storage, 0, entry.shape)
        return tensor

    def read_ahead(self, name: str) -> None:
        """Have the system start reading a tensor from the disk."""
        pages.read_ahead(*self._place(name))

    def forget(self, name: str) -> None:
        """Release the memory of a tensor that was read and is not used now; what was written to it is lost."""
        pages.forget(*self._place(name))

    def _place(self, name: str) -> tuple[int, int]:
        entry = self.entry(name)
        return self._storage.data_ptr() + entry.begin, entry.end - entry.begin


_OPEN: WeakValueDictionary[tuple[Any, ...], MappedShard] = WeakValueDictionary()
_OPENING = threading.Lock()


def _renew_lock() -> None:
    global _OPENING
    _OPENING = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_lock)  # the thread that held it is not there


def mapped_shard(path: StrPath) -> MappedShard:
    """A memory-mapped file for reading; the same object for every caller while one holds it and the file has not changed.

    All holders see what one of them writes to its tensors, so a model that is trained needs a `MappedShard` of its
    own.

    Args:
        path: As for `MappedShard`, which raises the same errors.
    """
    status = os.stat(path)
    key = (os.path.realpath(path), status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
    with _OPENING:
        shard = _OPEN.get(key)
        if shard is None:
            shard = _OPEN[key] = MappedShard(path)
        return shard


def _entry(path: str, header: TensorHeader) -> TensorEntry:
    dtype = DTYPES.get(header.dtype)
    if dtype is None:
        raise_damaged(
            path, f"the tensor {header.name!r} has the dtype {header.dtype!r}; torch has {', '.join(DTYPES)}"
        )
    return TensorEntry(dtype, header.shape, header.begin, header.end)
