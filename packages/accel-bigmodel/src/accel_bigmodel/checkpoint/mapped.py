"""Safetensors files mapped into memory: their tensors are views that are read from the disk when they are used."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch

from accel_bigmodel import pages
from accel_ops.tensor_files import DTYPE_NAMES

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # as the library that defines the format has it
METADATA = "__metadata__"
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()} | {"F8_E8M0": torch.float8_e8m0fnu}

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What the header of a file says about one of its tensors.

    Args:
        dtype: As stored.
        shape: Its sizes.
        begin: Where it begins, in bytes from the start of the file.
        end: Where it ends.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class MappedShard:
    """A safetensors file, verified and mapped into memory once.

    Its tensors may be written to: what is written belongs to this process, and the file stays as it is. They keep the
    map open by themselves. As with any map, nobody may shorten or overwrite the file meanwhile; replacing it by another
    under its name is safe.

    Args:
        path: The file.

    Raises:
        ValueError: The file is damaged, cut off or no safetensors file. Names the tensor where it is one.
        OSError: It cannot be opened.

    Example:
        ```python
        shard = MappedShard("model.safetensors")
        {name: shard.tensor(name) for name in shard.names()}
        ```
    """

    def __init__(self, path: StrPath) -> None:
        self.path = os.fspath(path)
        header, data_begin, file_bytes = _read_header(self.path)
        metadata = header.pop(METADATA, {})
        self.metadata: dict[str, str] = metadata if isinstance(metadata, dict) else {}
        self._entries = {name: _entry(self.path, name, said, data_begin) for name, said in header.items()}
        _check_layout(self.path, self._entries, data_begin, file_bytes)
        self._storage = torch.UntypedStorage.from_file(self.path, shared=False, nbytes=file_bytes)

    def names(self) -> list[str]:
        """The names of its tensors, as its header lists them."""
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> TensorEntry:
        """What the header says about a tensor.

        Raises:
            KeyError: The file has none of this name.
        """
        try:
            return self._entries[name]
        except KeyError:
            raise KeyError(f"{self.path} holds no tensor {name!r}: it has {len(self._entries)} others") from None

    def dtype_and_shape(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Of a tensor, as stored."""
        entry = self.entry(name)
        return entry.dtype, entry.shape

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, without a copy.

        Only one that does not begin at a multiple of its item size, as in files of careless writers, is copied.
        """
        entry = self.entry(name)
        tensor: Any = torch.empty(0, dtype=entry.dtype)
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=entry.dtype)
        part: Any = self._storage[entry.begin : entry.end]  # has the tensor's own address and length
        if entry.begin % entry.dtype.itemsize:
            part = part.clone()
        tensor.set_(part, 0, entry.shape)
        return tensor

    def read_ahead(self, name: str) -> None:
        """Let the system begin to read a tensor from the disk."""
        pages.read_ahead(*self._place(name))

    def forget(self, name: str) -> None:
        """Give back the memory of a tensor that was read and is not used now; what was written to it is lost."""
        pages.forget(*self._place(name))

    def _place(self, name: str) -> tuple[int, int]:
        entry = self.entry(name)
        return self._storage.data_ptr() + entry.begin, entry.end - entry.begin


_OPEN: WeakValueDictionary[tuple[Any, ...], MappedShard] = WeakValueDictionary()
_OPENING = threading.Lock()


def mapped_shard(path: StrPath) -> MappedShard:
    """The file, mapped, to be read; the same object as before while anybody holds it and the file has not changed.

    All who have it see what one of them writes to its tensors, so a model that is trained needs a `MappedShard` of its
    own.

    Args:
        path: As for `MappedShard`, which also says what is raised.
    """
    status = os.stat(path)
    key = (os.path.realpath(path), status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
    with _OPENING:
        shard = _OPEN.get(key)
        if shard is None:
            shard = _OPEN[key] = MappedShard(path)
        return shard


def _read_header(path: str) -> tuple[dict[str, Any], int, int]:
    """The header, where the data begin, and the bytes of the file."""
    with open(path, "rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if file_bytes < LENGTH_BYTES or not 1 < length <= MAX_HEADER_BYTES:
            _refuse(path, "it does not begin with the length of a header")
        if LENGTH_BYTES + length > file_bytes:
            _refuse(path, f"it is cut off within its header: of {length} bytes {file_bytes - LENGTH_BYTES} are there")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"its header cannot be read ({error})")
    if not isinstance(header, dict):
        _refuse(path, "its header is not a table of tensors")
    return header, LENGTH_BYTES + length, file_bytes


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found


def _entry(path: str, name: str, said: Any, data_begin: int) -> TensorEntry:
    try:
        dtype_name, shape, (begin, end) = said["dtype"], said["shape"], said["data_offsets"]
    except (TypeError, KeyError, ValueError):
        _refuse(path, f"of the tensor {name!r} it does not say dtype, shape and data_offsets")
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        _refuse(path, f"the tensor {name!r} has the dtype {dtype_name!r}; known are {', '.join(DTYPES)}")
    if not (isinstance(shape, list) and all(map(_is_count, shape)) and _is_count(begin) and _is_count(end)):
        _refuse(path, f"the tensor {name!r} has the shape {shape!r} and the data_offsets {[begin, end]!r}")
    if prod(shape) * dtype.itemsize != end - begin:
        _refuse(
            path,
            f"the tensor {name!r} of shape {tuple(shape)} and dtype {dtype_name} takes "
            f"{prod(shape) * dtype.itemsize} bytes, but {end - begin} are given to it",
        )
    return TensorEntry(dtype, tuple(shape), data_begin + begin, data_begin + end)


def _check_layout(path: str, entries: Mapping[str, TensorEntry], data_begin: int, file_bytes: int) -> None:
    """Tensors lie one behind the other, without gaps, up to the end of the file."""
    position = data_begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > file_bytes:
            _refuse(path, f"it is cut off: the tensor {name!r} ends {entry.end - file_bytes} bytes behind its end")
        if entry.begin < position:
            _refuse(path, f"the tensor {name!r} overlaps another one")
        if entry.begin > position:
            _refuse(path, f"there are {entry.begin - position} bytes of nothing before the tensor {name!r}")
        position = entry.end
    if position != file_bytes:
        _refuse(path, f"{file_bytes - position} bytes at its end belong to no tensor")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _refuse(path: str, problem: str) -> NoReturn:
    raise ValueError(f"{path} is damaged or no safetensors file: {problem}. Download or write it again.")


__all__ = ["MappedShard", "TensorEntry", "mapped_shard"]
