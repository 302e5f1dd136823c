"""Weights in torch's own format, seen as a safetensors file is: names and shapes first, values when they are used."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping

import torch

from accel_ops.files import load


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


__all__ = ["TorchShard"]
