"""A folder that `torch.distributed.checkpoint` wrote: what `.metadata` says is in it, and each tensor or a shard of it.

`.metadata` is a pickle, and unpickling runs what the file says. It is read here by an unpickler that knows the few names torch puts
into it, returns plain records for them, and raises an error for every other name. So no code of the file runs, and
`torch.distributed.checkpoint`, which takes a second to import, is not needed.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from accel_ops.files.filenames import FSDP_MODEL_NAME
from accel_ops.files.serialization import load
from accel_ops.files.staging import path_inside

METADATA_NAME = ".metadata"
METADATA_MODULE = "torch.distributed.checkpoint.metadata"
MAX_METADATA_BYTES = 1 << 31
SHARD_SUFFIX = ".distcp"
ARCHIVE_MARK = b"PK\x03\x04"  # the first bytes of files of torch.save
READ_ERRORS = (
    EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError, MemoryError, RecursionError,
    UnicodeDecodeError,
)  # fmt: skip

T = TypeVar("T")


class StoredBytes(NamedTuple):
    """Where one saved object is: `num_bytes` bytes of a file, from position `begin`."""

    file: Path
    begin: int
    num_bytes: int

    def read(self) -> Any:
        """Read the object, as plain data only.

        Raises:
            ValueError: It is damaged, or more than plain data.
            OSError: It cannot be read.
        """
        with self.file.open("rb") as file:
            file.seek(self.begin)
            buffer = io.BytesIO(file.read(self.num_bytes))
        if buffer.getbuffer()[: len(ARCHIVE_MARK)] != ARCHIVE_MARK:
            raise ValueError(f"{self.file} is damaged at byte {self.begin}. Use another checkpoint.")
        buffer.name = str(self.file)  # for its error messages
        return load(buffer, map_location="cpu")


class StoredChunk(NamedTuple):
    """A rectangular shard of a tensor, of shape `sizes`, that begins at the index `offsets`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: StoredBytes


class StoredTensor(NamedTuple):
    """A tensor whose shards are in the files of several ranks; they cover it without gaps.

    `path` has the keys that led to it in the nested state dict.
    """

    path: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the full tensor, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read_shard(self, chunk: StoredChunk) -> torch.Tensor:
        """Read one shard into CPU memory.

        Raises:
            ValueError: It is damaged.
            OSError: It cannot be read.
        """
        shard = chunk.stored.read()
        if not isinstance(shard, torch.Tensor) or shard.dtype != self.dtype or tuple(shard.shape) != chunk.sizes:
            raise ValueError(
                f"{chunk.stored.file} is damaged: the shard of {'.'.join(self.path)!r} at byte {chunk.stored.begin} does "
                f"not have dtype {self.dtype} and shape {list(chunk.sizes)}. Use another checkpoint."
            )
        return shard


class StoredObject(NamedTuple):
    """An entry that is not a tensor, in the format of `torch.save`."""

    path: tuple[str, ...]
    stored: StoredBytes


def read_contents(folder: Path) -> tuple[list[StoredTensor], list[StoredObject]]:
    """List the entries of a sharded checkpoint, after checking that all files exist.

    Args:
        folder: The folder with the file `.metadata`.

    Returns:
        Its tensors and its other objects, each in the order of the state dict.

    Raises:
        FileNotFoundError: A file that the metadata names is missing.
        ValueError: The metadata names something that torch does not write, is damaged, or does not fit the files.
        OSError: A file cannot be read.
    """
    try:
        return _list_contents(folder, _unpickle(folder / METADATA_NAME))
    except _Damage as damage:
        raise ValueError(f"{folder / METADATA_NAME} is damaged ({damage}). Use another checkpoint.") from damage


# ---- reading the pickle ---------------------------------------------------------------------------------------------


class _Damage(Exception):  # noqa: N818 - never leaves this module
    """The metadata is damaged."""


class _Record:
    """Stands for an object of torch: only its attributes are read."""


class _Index(_Record):
    """Identifies a chunk of a tensor; a key of `storage_data`."""

    fqn: str
    offset: tuple[int, ...] | None = None

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and (self.fqn, self.offset) == (other.fqn, other.offset)


class _Properties(_Record):
    """Properties of a tensor, of which only the dtype is used."""

    dtype: torch.dtype

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0] if isinstance(state, tuple) else state["dtype"]


class _Contents(_Record): ...


class _Tensor(_Record): ...


class _Bytes(_Record): ...


class _StorageInfo(_Record): ...


def _nothing(*values: Any) -> None:
    """Stands for what is not used: layouts, memory formats, the path under which the checkpoint was saved."""


ADMITTED: dict[tuple[str, str], Any] = {
    (METADATA_MODULE, "Metadata"): _Contents,
    (METADATA_MODULE, "MetadataIndex"): _Index,
    (METADATA_MODULE, "TensorStorageMetadata"): _Tensor,
    (METADATA_MODULE, "BytesStorageMetadata"): _Bytes,
    (METADATA_MODULE, "ChunkStorageMetadata"): _Record,
    (METADATA_MODULE, "TensorProperties"): _Properties,
    (METADATA_MODULE, "StorageMeta"): _Record,
    (METADATA_MODULE, "_MEM_FORMAT_ENCODING"): _nothing,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _nothing,
    ("collections", "OrderedDict"): OrderedDict,
    **{
        (module, kind): _nothing
        for module in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


class _ContentsUnpickler(pickle.Unpickler):
    """Unpickles torch's metadata and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name; raises for a name that torch does not write."""
        if (module, name) in ADMITTED:
            return ADMITTED[module, name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Raise: metadata never refers to other files."""
        raise pickle.UnpicklingError("it refers to another file")


def _unpickle(path: Path) -> _Contents:
    if path.stat().st_size > MAX_METADATA_BYTES:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes, more than the metadata of any checkpoint needs. Do not trust "
            "this checkpoint."
        )
    with path.open("rb") as file:
        try:
            return _expect(_ContentsUnpickler(file).load(), _Contents, "its root")
        except pickle.UnpicklingError as error:
            if "it names" in str(error) or "it refers" in str(error):
                raise ValueError(
                    f"{path} holds more than the metadata of a checkpoint ({error}), and nothing of it was executed. "
                    "Do not trust this checkpoint."
                ) from error
            raise _Damage(str(error)) from error
        except READ_ERRORS as error:
            raise _Damage(f"{type(error).__name__}: {error}") from error


# ---- what it says ---------------------------------------------------------------------------------------------------


def _list_contents(folder: Path, contents: _Contents) -> tuple[list[StoredTensor], list[StoredObject]]:
    entries = _field(contents, "state_dict_metadata", dict)
    paths = vars(contents).get("planner_data") or {}
    places = {
        (_field(index, "fqn", str), _sizes_or_none(index)): storage
        for index, storage in _field(contents, "storage_data", dict).items()
    }
    tensors, objects = [], []
    for name, entry in entries.items():
        path = tuple(str(key) for key in _expect(paths.get(name, (name,)), tuple, f"the path of {name!r}"))
        if isinstance(entry, _Tensor):
            tensors.append(_stored_tensor(folder, name, path, entry, places))
        elif isinstance(entry, _Bytes):
            objects.append(StoredObject(path, _stored_bytes(folder, name, places.get((name, None)))))
        else:
            raise _Damage(f"{name!r} is neither tensor nor bytes")
    return tensors, objects


def _stored_tensor(
    folder: Path, name: str, path: tuple[str, ...], entry: _Tensor, places: dict[Any, Any]
) -> StoredTensor:
    dtype = _field(_field(entry, "properties", _Properties), "dtype", torch.dtype)
    shape = _sizes(entry, "size")
    chunks = []
    for chunk in _field(entry, "chunks", list):
        offsets, sizes = _sizes(chunk, "offsets"), _sizes(chunk, "sizes")
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=False)]
        if not len(offsets) == len(sizes) == len(shape) or any(e > s for e, s in zip(ends, shape, strict=True)):
            raise _Damage(f"a shard of {name!r} at {list(offsets)} lies outside its shape {list(shape)}")
        chunks.append(StoredChunk(offsets, sizes, _stored_bytes(folder, name, places.get((name, offsets)))))
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    if covered != math.prod(shape) or len({chunk.offsets for chunk in chunks if math.prod(chunk.sizes)}) < sum(
        math.prod(chunk.sizes) > 0 for chunk in chunks
    ):
        raise _Damage(
            f"the shards of {name!r} have {covered} elements, its shape {list(shape)} has {math.prod(shape)}"
        )
    return StoredTensor(path, dtype, shape, tuple(chunks))


def _stored_bytes(folder: Path, name: str, storage: Any) -> StoredBytes:
    if not isinstance(storage, _StorageInfo):
        raise _Damage(f"it does not say where a shard of {name!r} is")
    if vars(storage).get("transform_descriptors"):
        raise ValueError(
            f"{folder} holds {name!r} encoded as {vars(storage)['transform_descriptors']!r}, which cannot be read. Save "
            "it without storage extensions."
        )
    file = path_inside(folder, _field(storage, "relative_path", str))
    offset, num_bytes = _field(storage, "offset", int), _field(storage, "length", int)
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} lacks the file {file.name!r}, which holds a shard of {name!r}. Copy the files of all ranks into "
            "one folder."
        )
    if offset < 0 or num_bytes < 0 or offset + num_bytes > file.stat().st_size:
        raise ValueError(
            f"{file} is truncated: {name!r} ends at byte {offset + num_bytes}, the file at {file.stat().st_size}. Copy "
            "it again, or use another checkpoint."
        )
    return StoredBytes(file, offset, num_bytes)


def _expect(value: Any, kind: type[T], what: str) -> T:
    if not isinstance(value, kind):
        raise _Damage(f"{what} is a {type(value).__name__.strip('_')}, not a {kind.__name__.strip('_')}")
    return value


def _field(record: Any, name: str, kind: type[T]) -> T:
    return _expect(vars(_expect(record, _Record, f"what holds {name!r}")).get(name), kind, repr(name))


def _sizes(record: Any, name: str) -> tuple[int, ...]:
    sizes = tuple(_field(record, name, tuple))
    if any(not isinstance(size, int) or size < 0 for size in sizes):
        raise _Damage(f"{name!r} is {sizes!r}")
    return sizes


def _sizes_or_none(index: Any) -> tuple[int, ...] | None:
    return None if vars(index).get("offset") is None else _sizes(index, "offset")


# ---- a model in it ---------------------------------------------------------------------------------------------------


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
        objects: The same for everything else in the state dict.

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
            shard = stored.read_shard(chunk)
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
        return self.objects[name].stored.read()
