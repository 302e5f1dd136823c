"""Reading the states of models and optimizers: each rank its own shards, whatever number of ranks wrote them."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from typing_extensions import override

from accel_integrations.training_state.formats.forms import MODEL, OPTIMIZER, StateKind
from accel_integrations.training_state.formats.shards import (
    METADATA_NAME,
    StoredObject,
    StoredTensor,
    read_contents,
)
from accel_integrations.training_state.formats.zero import (
    ZeroFiles,
    engine_folder,
    holds_engine,
    zero_model_state,
    zero_optimizer_state,
)
from accel_integrations.training_state.interface import CPU, Keys, StoredState
from accel_ops.files.filenames import weights_file
from accel_ops.files.serialization import load
from accel_ops.files.tensor_files import read_tensors
from accel_ops.modules import to_local


@final
class ShardedState(StoredState):
    """A folder of `.distcp` files.

    Args:
        where: The folder.
        key: The top-level key of the state.

    Raises:
        ValueError: It is damaged, or has nothing under `key`.
        OSError: Files are missing or cannot be read.
    """

    def __init__(self, where: Path, key: str) -> None:
        super().__init__(where)
        self._tensors: dict[Keys, StoredTensor] = {}
        self._objects: dict[Keys, StoredObject] = {}
        tensors, objects = read_contents(where)
        for tensor in tensors:
            if tensor.path[0] == key:
                self._tensors[tensor.path[1:]] = tensor
        for other in objects:
            if other.path[0] == key:
                self._objects[other.path[1:]] = other
        if (tensors or objects) and not (self._tensors or self._objects):
            raise ValueError(f"{where} holds no {key!r} state. Load another checkpoint.")
        self.shapes = {keys: tensor.shape for keys, tensor in self._tensors.items()}
        self.objects = list(self._objects)

    @override
    def dtype(self, keys: Keys) -> torch.dtype:
        return self._tensors[keys].dtype

    @override
    def read(self, keys: Keys, offsets: Sequence[int], sizes: Sequence[int], into: torch.Tensor) -> None:
        """Copy from the chunks that overlap with the shard."""
        for chunk in self._tensors[keys].chunks:
            begins = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
            ends = [
                min(a + size, b + length)
                for a, size, b, length in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
                continue
            stored = self._tensors[keys].read_shard(chunk)
            into[_window(begins, ends, offsets)].copy_(stored[_window(begins, ends, chunk.offsets)])

    @override
    def read_object(self, keys: Keys) -> Any:
        return self._objects[keys].stored.read()


@final
class FileState(StoredState):
    """One file with full tensors, of `torch.save` or safetensors.

    Args:
        where: The file; tensors are memory-mapped where possible.

    Raises:
        ValueError: It is damaged, or does not hold a dict.
    """

    def __init__(self, where: Path) -> None:
        super().__init__(where)
        if where.suffix == ".safetensors":
            content: Any = read_tensors(where)
        else:
            content = load(where, map_location="cpu", mmap=zipfile.is_zipfile(where))
        if not isinstance(content, Mapping):
            raise ValueError(
                f"{where} holds a {type(content).__name__} instead of a state dict. Load another checkpoint."
            )
        self._values = dict(_walk(content, ()))
        for keys, value in self._values.items():
            if isinstance(value, torch.Tensor):
                self.shapes[keys] = tuple(value.shape)
            else:
                self.objects.append(keys)

    @override
    def dtype(self, keys: Keys) -> torch.dtype:
        dtype: torch.dtype = self._values[keys].dtype
        return dtype

    @override
    def read(self, keys: Keys, offsets: Sequence[int], sizes: Sequence[int], into: torch.Tensor) -> None:
        """Copy from the memory-mapped file."""
        ends = [begin + size for begin, size in zip(offsets, sizes, strict=True)]
        into.copy_(self._values[keys][_window(offsets, ends, (0,) * len(ends))])

    @override
    def read_object(self, keys: Keys) -> Any:
        """The entry, which the file holds as plain data."""
        return self._values[keys]


@final
class LocalState(StoredState):
    """A file with the shards of one rank (LOCAL_STATE_DICT).

    Args:
        where: The file.

    Raises:
        ValueError: It is damaged, or was written in a run with another number of ranks.
    """

    def __init__(self, where: Path) -> None:
        super().__init__(where)
        content = load(where, map_location="cpu", mmap=zipfile.is_zipfile(where))
        if not isinstance(content, Mapping) or set(content) != {"parts", "shapes", "num_processes"}:
            raise ValueError(f"{where} holds no shards saved as LOCAL_STATE_DICT. Load another checkpoint.")
        present = dist.get_world_size() if dist.is_initialized() else 1
        if content["num_processes"] != present:
            raise ValueError(
                f"{where} was saved as LOCAL_STATE_DICT by one of {content['num_processes']} processes, but this run "
                f"has {present}. Launch as many processes as when it was saved, or save as SHARDED_STATE_DICT, which "
                "any number of processes can load."
            )
        self._shards = dict(_walk(content["parts"], ()))
        self.shapes = {tuple(keys): tuple(shape) for keys, shape in content["shapes"]}
        self.objects = [keys for keys in self._shards if keys not in self.shapes]

    @override
    def dtype(self, keys: Keys) -> torch.dtype:
        dtype: torch.dtype = self._shards[keys].dtype
        return dtype

    @override
    def fill(self, keys: Keys, like: torch.Tensor, device: torch.device = CPU) -> torch.Tensor:
        """Read the shard of this rank, which must have the same shape as when it was saved."""
        filled = torch.empty_like(like, dtype=self.dtype(keys), device=device)
        self.read(keys, (), to_local(filled).shape, to_local(filled))
        return filled

    @override
    def read(self, keys: Keys, offsets: Sequence[int], sizes: Sequence[int], into: torch.Tensor) -> None:
        if self._shards[keys].shape != into.shape:
            raise ValueError(
                f"{self.where} holds a shard of {'.'.join(keys)!r} with shape {tuple(self._shards[keys].shape)}, but "
                f"the shard of this rank has shape {tuple(into.shape)}. Shard the model as when it was saved."
            )
        into.copy_(self._shards[keys])

    @override
    def read_object(self, keys: Keys) -> Any:
        """The entry, which the file holds as plain data."""
        return self._shards[keys]


def _window(begins: Sequence[int], ends: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - zero, b - zero) for a, b, zero in zip(begins, ends, origin, strict=True))


def _walk(value: Any, keys: Keys) -> Iterator[tuple[Keys, Any]]:
    """The leaves of nested dictionaries; lists are leaves."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _walk(inner, (*keys, str(key)))
    elif not isinstance(value, Mapping):
        yield keys, value


# ---- finding them ---------------------------------------------------------------------------------------------------


def open_model_state(folder: Path, index: int) -> StoredState:
    """The state of a model in a checkpoint, in whichever form.

    Raises:
        ValueError: There is none, or it is damaged.
    """
    if holds_engine(engine := engine_folder(folder, index)):
        if beside := sorted(path.name for path in folder.glob("plain_model_*.bin")):
            raise ValueError(
                f"The checkpoint {folder} holds models that DeepSpeed trained and others ({', '.join(beside)}), and not "
                "in which order they were prepared. Load it with a DeepSpeedPlugin."
            )
        return zero_model_state(ZeroFiles.read(engine))
    candidates = [MODEL.file_name(index), weights_file(index, True), weights_file(index, False)]
    return _open(folder, MODEL, index, candidates)


def open_optimizer_state(folder: Path, index: int) -> StoredState:
    """The state of an optimizer in a checkpoint, in whichever form.

    Raises:
        ValueError: There is none, or it is damaged.
    """
    if holds_engine(engine_folder(folder, 0)):
        return zero_optimizer_state(_engine_with_optimizer(folder, index))
    return _open(folder, OPTIMIZER, index, [OPTIMIZER.file_name(index)])


def _engine_with_optimizer(folder: Path, index: int) -> ZeroFiles:
    """The engine of DeepSpeed that has the optimizer at `index`: some engines have none."""
    num_optimizers = engine = 0
    while holds_engine(path := engine_folder(folder, engine)):
        files = ZeroFiles.read(path)
        if files.has_optimizer:
            if num_optimizers == index:
                return files
            num_optimizers += 1
        engine += 1
    raise ValueError(
        f"The checkpoint {folder} holds {num_optimizers} optimizers, but more are prepared. Prepare the same objects as when it was "
        "saved, in the same order."
    )


def _open(folder: Path, kind: StateKind, index: int, file_names: Sequence[str]) -> StoredState:
    sharded = folder / kind.folder_name(index)
    for candidate in (sharded, folder):  # other libraries pass the inner folder
        if (candidate / METADATA_NAME).is_file():
            return ShardedState(candidate, kind.key)
    rank_file = folder / kind.rank_file_name(index, dist.get_rank() if dist.is_initialized() else 0)
    first = folder / kind.rank_file_name(index, 0)
    if rank_file.is_file() or first.is_file():
        return LocalState(rank_file if rank_file.is_file() else first)
    for name in file_names:
        if (folder / name).is_file():
            return FileState(folder / name)
    raise ValueError(
        f"The checkpoint {folder} holds no state of {kind.key} {index}: neither the folder {sharded.name!r} nor any of "
        f"{', '.join(map(repr, file_names))} is in it. Prepare the same objects as when it was saved, in the same "
        "order."
    )
