"""Reading the full tensors of a sharded checkpoint, one at a time."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch

from accel_integrations.training_state.formats.shard_metadata import (
    METADATA_NAME,
    StoredBytes,
    StoredChunk,
    StoredObject,
    StoredTensor,
    read_contents,
)
from accel_ops.files.filenames import FSDP_MODEL_NAME
from accel_ops.files.serialization import load

SHARD_SUFFIX = ".distcp"
ARCHIVE_MARK = b"PK\x03\x04"  # the first bytes of files of torch.save


def find_sharded_folder(path: str | os.PathLike[str]) -> Path:
    """Find the folder of the sharded model at a path.

    Args:
        path: The folder with the file `.metadata`, or a checkpoint that holds exactly one such folder of a model.

    Raises:
        FileNotFoundError: There is no such folder, or no sharded model in it.
        NotADirectoryError: It is a file.
        ValueError: It holds several models.
    """
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(f"The checkpoint {os.fspath(path)!r} does not exist. Check the path.")
    if not folder.is_dir():
        raise NotADirectoryError(f"{os.fspath(path)!r} is a file. Pass the folder of a sharded checkpoint.")
    if (folder / METADATA_NAME).is_file():
        return folder
    inner = sorted(entry for entry in folder.glob(f"{FSDP_MODEL_NAME}_*") if (entry / METADATA_NAME).is_file())
    if len(inner) > 1:
        names = ", ".join(entry.name for entry in inner)
        raise ValueError(
            f"{os.fspath(path)!r} holds {len(inner)} sharded models ({names}). Pass the folder of one of them."
        )
    if not inner and any(folder.glob(f"*{SHARD_SUFFIX}")):
        raise FileNotFoundError(
            f"{os.fspath(path)!r} has {SHARD_SUFFIX} files but no {METADATA_NAME}, which is written last. The save was "
            "interrupted, or the file was not copied."
        )
    if not inner:
        raise FileNotFoundError(
            f"{os.fspath(path)!r} is not a sharded checkpoint (no {METADATA_NAME} in it). Pass the folder, usually "
            f"called {FSDP_MODEL_NAME}_0, that was saved with SHARDED_STATE_DICT."
        )
    return inner[0]


class ShardedModel:
    """The model in a sharded checkpoint.

    Args:
        folder: The folder with the file `.metadata`. All files it names must exist.

    Attributes:
        tensors: The tensors by their names in the model's state dict, not read yet.
        objects: Likewise everything else in the state dict.

    Raises:
        ValueError: The checkpoint is damaged or holds no model.
        OSError: A file is missing or cannot be read.

    Example:
        ```python
        model = ShardedModel(find_sharded_folder("checkpoint/pytorch_model_fsdp_0"))
        weight = model.read_tensor("lm_head.weight")
        ```
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tensors, objects = read_contents(folder)
        prefix = self._prefix({tensor.path for tensor in tensors} | {other.path for other in objects})
        self.tensors: dict[str, StoredTensor] = {
            ".".join(entry.path[len(prefix) :]): entry for entry in tensors if entry.path[: len(prefix)] == prefix
        }
        self.objects: dict[str, StoredObject] = {
            ".".join(entry.path[len(prefix) :]): entry for entry in objects if entry.path[: len(prefix)] == prefix
        }
        if not self.tensors:
            raise ValueError(f"{folder} holds no tensors of a model. Pass the folder of the model.")

    def _prefix(self, paths: set[tuple[str, ...]]) -> tuple[str, ...]:
        """The keys above the model's state dict: none, `("model",)` as accelerate saves, or `("app", "model")`."""
        prefix: tuple[str, ...] = ()
        while True:
            nested = {path for path in paths if len(path) > len(prefix) + 1}
            keys = {path[len(prefix)] for path in nested}
            if keys == {"optimizer"}:
                raise ValueError(f"{self.folder} holds the state of an optimizer. Pass the folder of the model.")
            if "model" not in keys and (len(keys) != 1 or nested != paths):
                return prefix
            prefix = (*prefix, "model" if "model" in keys else keys.pop())
            paths = {path for path in nested if path[: len(prefix)] == prefix}

    def read_tensor(self, name: str) -> torch.Tensor:
        """Read one full tensor into CPU memory, contiguous.

        Raises:
            ValueError: A shard is damaged.
            OSError: A shard cannot be read.
        """
        stored = self.tensors[name]
        full: torch.Tensor | None = None
        for chunk in stored.chunks:
            shard = read_shard(stored, chunk)
            if chunk.sizes == stored.shape:
                return shard.detach().contiguous()
            if full is None:
                full = torch.empty(stored.shape, dtype=stored.dtype)
            where = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
            full[where] = shard.detach()
        return torch.empty(stored.shape, dtype=stored.dtype) if full is None else full

    def read_object(self, name: str) -> Any:
        """Read an entry that is not a tensor, as plain data only.

        Raises:
            ValueError: It is damaged, or more than plain data.
            OSError: It cannot be read.
        """
        return read_value(self.objects[name].stored)


def read_shard(stored: StoredTensor, chunk: StoredChunk) -> torch.Tensor:
    """Read one shard of a tensor into CPU memory.

    Raises:
        ValueError: It is damaged.
        OSError: It cannot be read.
    """
    shard = read_value(chunk.stored)
    if not isinstance(shard, torch.Tensor) or shard.dtype != stored.dtype or tuple(shard.shape) != chunk.sizes:
        raise ValueError(
            f"{chunk.stored.file} is damaged: the shard of {'.'.join(stored.path)!r} at byte {chunk.stored.begin} does "
            f"not have dtype {stored.dtype} and shape {list(chunk.sizes)}. Use another checkpoint."
        )
    return shard


def read_value(stored: StoredBytes) -> Any:
    """Read one saved object, as plain data only.

    Raises:
        ValueError: It is damaged, or more than plain data.
        OSError: It cannot be read.
    """
    with stored.file.open("rb") as file:
        file.seek(stored.begin)
        buffer = io.BytesIO(file.read(stored.num_bytes))
    if buffer.getbuffer()[: len(ARCHIVE_MARK)] != ARCHIVE_MARK:
        raise ValueError(f"{stored.file} is damaged at byte {stored.begin}. Use another checkpoint.")
    buffer.name = str(stored.file)  # for its error messages
    return load(buffer, map_location="cpu")
