"""An opened checkpoint: which tensors it holds, before any of them is read."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from accel_bigmodel.checkpoint.index import CheckpointFiles
from accel_bigmodel.checkpoint.mapped import MappedShard
from accel_ops.files import load
from accel_ops.safetensors_header import LENGTH_BYTES

SAFETENSORS_ENDING = ".safetensors"
TORCH_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")


class TorchShard:
    """A file of `torch.save` with a dict of tensors; nothing in it is executed.

    It is mapped into memory, and so are its tensors, as those of `MappedShard`. Only files in the format of torch before
    1.6 are read as a whole.

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
                f"{self.path} holds a {type(content).__name__}, not a dict of tensors: it is no checkpoint."
            )
        for name, value in content.items():
            tensor = isinstance(value, torch.Tensor)
            if not isinstance(name, str) or not (tensor or name.rpartition(".")[2] == "_extra_state"):
                raise ValueError(
                    f"{self.path} holds a {type(value).__name__} under {name!r}, not a tensor: it is no state dict of a "
                    "model. If it holds one, save that by itself."
                )
        self._content = dict(content)

    def names(self) -> list[str]:
        """The names of its tensors, as saved."""
        return list(self._content)

    def __contains__(self, name: str) -> bool:
        return name in self._content

    def dtype_and_shape(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Of a tensor, as stored; None for a module's extra state of another kind."""
        value = self._content[name]
        return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else None

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor on the CPU."""
        return self._content[name]


Shard = MappedShard | TorchShard


def open_shard(path: str | os.PathLike[str]) -> Shard:
    """One weights file, in the format that its name says.

    Raises:
        ValueError: It is damaged, or was written for another framework than torch.
    """
    if not _is_safetensors(path):
        return TorchShard(path)
    shard = MappedShard(path)  # a map of its own: what one model writes to its weights is not seen by another
    framework = shard.metadata.get("format", "pt")
    if framework != "pt":
        raise ValueError(
            f"{os.fspath(path)} says that it was written for {framework!r}, not for 'pt' (torch), where names and layouts "
            "may differ: convert it, or load one that was saved from torch."
        )
    return shard


def _is_safetensors(path: str | os.PathLike[str]) -> bool:
    """By its name, or, as in caches where files have none, by how it begins."""
    if os.fspath(path).endswith((SAFETENSORS_ENDING, *TORCH_ENDINGS)):
        return os.fspath(path).endswith(SAFETENSORS_ENDING)
    with open(path, "rb") as file:
        return file.read(LENGTH_BYTES + 1)[LENGTH_BYTES:] == b"{"


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
        shards = {path: open_shard(path) for path in files.files}
        for path, shard in shards.items():
            for name in shard.names():
                if files.weight_map.get(name, path) == path:  # a name that is in two files: as the index says
                    self._shards[name] = shard
        self._check_index(files.weight_map)

    def _check_index(self, weight_map: dict[str, Path]) -> None:
        absent = [name for name in weight_map if name not in self._shards]
        if absent:
            raise ValueError(
                f"The index of {self.source} says that {weight_map[absent[0]].name} holds {absent[0]!r}, which it does not "
                f"({len(absent)} such names): the files are not of one checkpoint. Download or copy it again."
            )

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def dtype_and_shape(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Of a tensor, as stored; None for a module's extra state that is no tensor."""
        return self._shards[name].dtype_and_shape(name)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, a view of its mapped file."""
        return self._shards[name].tensor(name)

    def read_ahead(self, name: str) -> None:
        """Let the system begin to read a tensor, where it can."""
        shard = self._shards[name]
        if isinstance(shard, MappedShard):
            shard.read_ahead(name)

    def forget(self, name: str) -> None:
        """Give back the memory of a tensor that was copied."""
        shard = self._shards[name]
        if isinstance(shard, MappedShard):
            shard.forget(name)

    def mapped_file(self, name: str) -> str | None:
        """The safetensors file that holds a tensor, from which it can be read again at any time."""
        shard = self._shards[name]
        return os.path.abspath(shard.path) if isinstance(shard, MappedShard) else None


__all__ = ["CheckpointContents", "open_shard"]
