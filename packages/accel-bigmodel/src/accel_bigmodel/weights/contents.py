"""An opened checkpoint: the names, dtypes and shapes of its tensors are known before any of them is read."""

from __future__ import annotations

import ctypes
import os
import weakref
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from accel_bigmodel.weights.index import CheckpointFiles
from accel_ops.files.mapped import MappedShard
from accel_ops.files.safetensors_header import LENGTH_BYTES
from accel_ops.files.serialization import load

SAFETENSORS_ENDING = ".safetensors"
TORCH_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")


class TorchShard:
    """A file of `torch.save` with a dict of tensors; no code in it is executed.

    It is memory-mapped, and its tensors are views of it, as those of `MappedShard`. Only files in the format of torch before
    1.6 are read completely.

    Args:
        path: The file.

    Raises:
        ValueError: The file is damaged, holds code, or holds other than tensors by name.
        OSError: It cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        content = load(self.path, map_location="cpu", mmap=zipfile.is_zipfile(self.path))
        if not isinstance(content, Mapping):
            raise ValueError(
                f"{self.path} holds a {type(content).__name__}, not a dict of tensors: it is not a checkpoint of a model."
            )
        for name, value in content.items():
            tensor = isinstance(value, torch.Tensor)
            if not isinstance(name, str) or not (tensor or name.rpartition(".")[2] == "_extra_state"):
                raise ValueError(
                    f"{self.path} holds a {type(value).__name__} under {name!r}, not a tensor: it is not the state dict of a "
                    "model. If a state dict is nested in it, save that on its own."
                )
        self._content = dict(content)

    def names(self) -> list[str]:
        """The names of its tensors, as saved."""
        return list(self._content)

    def __contains__(self, name: str) -> bool:
        return name in self._content

    def dtype_and_shape(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Dtype and shape of a tensor, as stored; None for a module's extra state that is not a tensor."""
        value = self._content[name]
        return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else None

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in CPU memory."""
        return self._content[name]


Shard = MappedShard | TorchShard


def open_shard(path: str | os.PathLike[str]) -> Shard:
    """Open one weights file, in the format of its file name.

    Raises:
        ValueError: It is damaged, or was written for another framework than torch.
    """
    if not _is_safetensors(path):
        return TorchShard(path)
    shard = MappedShard(path)  # not `mapped_shard`: what one model writes to its weights must not be seen by another
    framework = shard.metadata.get("format", "pt")
    if framework != "pt":
        raise ValueError(
            f"{os.fspath(path)} was written for {framework!r}, not for 'pt' (torch), and names and layouts "
            "may differ: convert it, or load one that was saved from torch."
        )
    return shard


def _is_safetensors(path: str | os.PathLike[str]) -> bool:
    """By its file name or, in caches where files have no ending, by its first bytes."""
    if os.fspath(path).endswith((SAFETENSORS_ENDING, *TORCH_ENDINGS)):
        return os.fspath(path).endswith(SAFETENSORS_ENDING)
    with open(path, "rb") as file:
        return file.read(LENGTH_BYTES + 1)[LENGTH_BYTES:] == b"{"


class ByteSource(Protocol):
    """The bytes of one tensor, read by several threads."""

    def read_into(self, buffer: torch.Tensor, begin: int) -> None:
        """Fill a buffer (uint8, one dimension) with the bytes from `begin` on."""


@dataclass(frozen=True, slots=True)
class FileBytes:
    """The bytes of a tensor in a file.

    Args:
        descriptor: The opened file.
        offset: Of the tensor's first byte.
    """

    descriptor: int
    offset: int

    def read_into(self, buffer: torch.Tensor, begin: int) -> None:
        """Fill a buffer (uint8, one dimension) with the bytes from `begin` on.

        Raises:
            OSError: The file cannot be read, or has been truncated.
        """
        left = memoryview((ctypes.c_ubyte * buffer.numel()).from_address(buffer.data_ptr()))  # torch may lack numpy
        position = self.offset + begin
        num_read = self._read_cached(left, position)
        if num_read < len(left) and hasattr(os, "posix_fadvise"):  # not on macOS
            # No more than what is read now: memory may be short.
            os.posix_fadvise(self.descriptor, position + num_read, len(left) - num_read, os.POSIX_FADV_WILLNEED)
        while num_read < len(left):
            num_more = os.preadv(self.descriptor, [left[num_read:]], position + num_read)
            if num_more == 0:
                raise OSError("A file of the checkpoint was truncated while it was being read.")
            num_read += num_more

    def _read_cached(self, buffer: memoryview, position: int) -> int:
        """Read what is in the page cache, up to the first byte that is not; returns how many bytes these are."""
        try:
            return os.preadv(self.descriptor, [buffer], position, os.RWF_NOWAIT)
        except (OSError, AttributeError):  # nothing is there; the file system, or the system, cannot tell
            return 0


@dataclass(frozen=True, slots=True)
class MemoryBytes:
    """The bytes of a tensor in memory, or in a memory-mapped file.

    Args:
        content: The bytes (uint8, one dimension).
    """

    content: torch.Tensor

    def read_into(self, buffer: torch.Tensor, begin: int) -> None:
        """Fill a buffer (uint8, one dimension) with the bytes from `begin` on."""
        buffer.copy_(self.content[begin : begin + buffer.numel()])


class CheckpointContents:
    """The tensors of all files of a checkpoint, by name.

    Args:
        files: What `find_checkpoint` gave.

    Raises:
        ValueError: A file is damaged, or does not hold what the index says.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        self.source = files.source
        self._shards: dict[str, Shard] = {}
        self._identities = {os.fspath(path): _identity(os.stat(path)) for path in files.files}
        self._descriptors: dict[str, int | None] = {}
        shards = {path: open_shard(path) for path in files.files}
        for path, shard in shards.items():
            for name in shard.names():
                if files.weight_map.get(name, path) == path:  # for a name in two files, the index decides
                    self._shards[name] = shard
        self._check_index(files.weight_map)

    def _check_index(self, weight_map: dict[str, Path]) -> None:
        absent = [name for name in weight_map if name not in self._shards]
        if absent:
            raise ValueError(
                f"The index of {self.source} maps {absent[0]!r} to {weight_map[absent[0]].name}, which does not hold it "
                f"({len(absent)} such names): the files belong to different checkpoints. Download or copy the checkpoint again."
            )

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def dtype_and_shape(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Dtype and shape of a tensor, as stored; None for a module's extra state that is not a tensor."""
        return self._shards[name].dtype_and_shape(name)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in CPU memory, a view of its memory-mapped file."""
        return self._shards[name].tensor(name)

    def byte_source(self, name: str) -> ByteSource | None:
        """The bytes of a tensor, in its file or in memory; None for a sparse, a quantised or a conjugated tensor."""
        shard = self._shards[name]
        descriptor = self._descriptor(shard.path) if isinstance(shard, MappedShard) else None
        if descriptor is not None and isinstance(shard, MappedShard):
            return FileBytes(descriptor, shard.entry(name).begin)
        tensor = self.tensor(name).detach()
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return None
        return MemoryBytes(tensor.contiguous().reshape(-1).view(torch.uint8))

    def _descriptor(self, path: str) -> int | None:
        """A file, opened for reading; None when the path names another file by now, in which tensors may be elsewhere."""
        if path not in self._descriptors:
            descriptor = os.open(path, os.O_RDONLY) if hasattr(os, "preadv") else None
            if descriptor is not None:
                weakref.finalize(self, os.close, descriptor)
            is_same = descriptor is not None and _identity(os.fstat(descriptor)) == self._identities[path]
            self._descriptors[path] = descriptor if is_same else None
        return self._descriptors[path]

    def read_ahead(self, name: str) -> None:
        """Have the system start reading a tensor, where it can."""
        shard = self._shards[name]
        if isinstance(shard, MappedShard):
            shard.read_ahead(name)

    def forget(self, name: str) -> None:
        """Release the memory of a tensor that was copied."""
        shard = self._shards[name]
        if isinstance(shard, MappedShard):
            shard.forget(name)

    def mapped_file(self, name: str) -> str | None:
        """The safetensors file that holds a tensor, from which it can be read again at any time."""
        shard = self._shards[name]
        return os.path.abspath(shard.path) if isinstance(shard, MappedShard) else None


def _identity(status: os.stat_result) -> Any:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
