"""Saving and loading objects without ever executing code from a file."""

from __future__ import annotations

import array
import collections
import copyreg
import datetime
import decimal
import errno
import importlib
import io
import os
import pathlib
import pickle
import re
import reprlib
import types
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.serialization import safe_globals

from accel_ops.files.durable import write_atomically
from accel_ops.files.tensor_files import check_tensors, clean_state_dict_for_safetensors, write_tensors
from accel_state.processes import PartialState
from accel_state.supervision import report_progress

if TYPE_CHECKING:
    from accel_ops.files.tensor_files import Writable

FileLike = str | os.PathLike[str] | IO[bytes]

NUMPY_DTYPES = [
    "Bool", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "Float16", "Float32", "Float64",
    "Complex64", "Complex128", "Str", "Bytes", "LongLong", "ULongLong", "DateTime64", "TimeDelta64",
]  # fmt: skip
LOAD_OPTIONS = frozenset({"mmap", "encoding"})
READ_ERRORS = (
    RuntimeError, EOFError, KeyError, TypeError, AttributeError, IndexError, UnicodeDecodeError, AssertionError,
)  # fmt: skip
PLAIN_TYPES = frozenset({
    type(None), bool, int, float, complex, str, bytes, bytearray,
    torch.dtype, torch.device, torch.Tensor, torch.nn.Parameter,
})  # fmt: skip
STANDARD_TYPES: list[Any] = [
    # neither range nor Fraction: a few bytes of a file could have them compute or fill the memory for hours
    list, dict, set, int, float, str, frozenset, slice, array.array,
    collections.deque, collections.defaultdict, collections.ChainMap, types.SimpleNamespace,
    datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone, decimal.Decimal, uuid.UUID,
    torch.Generator,
    *(  # files name them as the version of Python that wrote them does
        (getattr(pathlib, name), f"{home}.{name}")
        for name in ("PurePosixPath", "PureWindowsPath", "PosixPath", "WindowsPath")
        for home in ("pathlib", "pathlib._local")
    ),
]  # fmt: skip
"""Types of Python and torch that files may name: a call with plain data makes them, and runs no code of a program."""


class PlainPickle:
    """The `pickle_module` of `torch.save` with which these types are written as a call that torch's reader of plain data makes.

    Other pickles of them append items or set attributes, which it does for a few types only.
    """

    class Pickler(pickle.Pickler):
        """Pickles as usual, except for the types in its table."""

        dispatch_table: Any = collections.ChainMap(
            {
                collections.deque: lambda value: (collections.deque, (list(value), value.maxlen)),
                collections.defaultdict: lambda value: (collections.defaultdict, (value.default_factory, dict(value))),
                array.array: lambda value: (array.array, (value.typecode, value.tolist())),
                uuid.UUID: lambda value: (uuid.UUID, (str(value),)),
            },
            copyreg.dispatch_table,
        )


@cache
def allowed_globals() -> list[Any]:
    """Globals that a loaded file may name beyond those that torch allows: standard types, and NumPy's plain arrays and scalars.

    Random states of accelerate 1.15 hold such arrays. Arrays of objects are not among them.
    """
    try:
        import numpy as np
    except ImportError:
        return [bytes, *STANDARD_TYPES]
    home = "core" if np.__version__.startswith("1.") else "_core"
    multiarray = importlib.import_module(f"numpy.{home}.multiarray")
    classes = [getattr(np.dtypes, f"{name}DType", None) for name in NUMPY_DTYPES]
    functions = [multiarray._reconstruct, multiarray.scalar]
    named = [  # files name them as the NumPy version that wrote them does
        (function, f"numpy.{package}.multiarray.{function.__name__}")
        for function in functions
        for package in ("core", "_core")
    ]
    return [bytes, *STANDARD_TYPES, np.ndarray, np.dtype, *named, *(kind for kind in classes if kind is not None)]


def save(obj: Any, f: FileLike, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Save an object from the main process, atomically: the file appears only when it is complete and synced.

    Args:
        obj: Anything that can be pickled; a dict of tensors for safetensors.
        f: Path, or binary file to write to.
        save_on_each_node: Save from the main process of every machine instead.
        safe_serialization: Write the safetensors format, tied weights once.

    Raises:
        TypeError: The object holds something that a safetensors file cannot.
        OSError: The file could not be written; the old one is unchanged.
    """
    report_progress()
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    if not isinstance(f, str | os.PathLike):
        serialize(obj, f, safe_serialization)
        return
    with write_atomically(f) as file:
        serialize(obj, file, safe_serialization)


def serialize(obj: Any, file: Writable, safe_serialization: bool) -> None:
    """Write an object to an open file as torch does, or in the safetensors format."""
    if not safe_serialization:
        torch.save(obj, file, pickle_module=PlainPickle)  # type: ignore[arg-type]  # torch needs no more than `write` and `flush`
        return
    write_tensors(file, for_safetensors(obj), {"format": "pt"})


def for_safetensors(obj: Any) -> dict[str, torch.Tensor]:
    """The tensors of a state dict that a safetensors file gets: each once, and contiguous.

    Raises:
        TypeError: It is no state dict, or has an entry that such a file cannot hold.
    """
    if not isinstance(obj, Mapping):
        raise TypeError(
            f"safe_serialization=True needs a dict of tensors, not a {type(obj).__name__}: pass a state dict, or "
            "safe_serialization=False"
        )
    tensors = clean_state_dict_for_safetensors(obj)
    check_tensors(tensors)
    return tensors


def load(f: FileLike, map_location: Any = None, **kwargs: Any) -> Any:
    """Load what `save` or `torch.save` wrote, as data only: no code in the file runs.

    Args:
        f: Path or binary file.
        map_location: Device of the tensors, as for `torch.load`.
        kwargs: Further arguments of `torch.load`, such as `mmap=True`.

    Raises:
        ValueError: The file is damaged, is compressed, or holds other than tensors, int, float, str and containers of these.
            `torch.serialization.add_safe_globals([...])` allows a class that you trust.
        OSError: It cannot be read.

    Example:
        ```python
        state = load("optimizer.bin", map_location="cpu")
        ```
    """
    report_progress()
    if kwargs.pop("weights_only", True) is not True:
        raise ValueError(
            "weights_only=False would run code from the file: leave it out, and allow the classes you trust with "
            "torch.serialization.add_safe_globals([...])"
        )
    if unknown := set(kwargs) - LOAD_OPTIONS:
        raise TypeError(f"load() has no argument {sorted(unknown)[0]!r}: choose from {sorted(LOAD_OPTIONS)}")
    name = os.fspath(f) if isinstance(f, str | os.PathLike) else str(getattr(f, "name", f))
    _check_not_compressed(f, name)
    try:
        with safe_globals(allowed_globals()):
            return torch.load(f, map_location=map_location, weights_only=True, **kwargs)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{name} holds more than plain data, and nothing of it was executed ({_rejected_object(error)}). If you trust "
            "who wrote it, allow its classes with torch.serialization.add_safe_globals([...]) and load again"
        ) from error
    except (OSError, *READ_ERRORS) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a seek before the beginning
            raise
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name} cannot be loaded ({reason}): it is damaged or not from torch.save") from error


def _rejected_object(error: pickle.UnpicklingError) -> str:
    """The object that torch rejected, extracted from its long message."""
    if match := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it names {match[1]}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("Check the")]
    return lines[-1].removeprefix("WeightsUnpickler error: ") if lines else "something unknown"


def _check_not_compressed(f: FileLike, name: str) -> None:
    """Raise an error for an archive that is larger when read; torch stores everything once and uncompressed."""
    position = None if isinstance(f, str | os.PathLike) else f.tell()
    try:
        with zipfile.ZipFile(f) as archive:
            entries = archive.infolist()
            num_bytes = archive.start_dir
    except (zipfile.BadZipFile, NotImplementedError, OSError):
        return  # torch says what is wrong, or it is of torch's older formats
    finally:
        if position is not None:
            f.seek(position)  # type: ignore[union-attr]
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not stored or sum(entry.file_size for entry in entries) > num_bytes:
        raise ValueError(
            f"{name} is larger when read than on the disk, which no file of torch.save is: do not trust it"
        )


def check_loadable(value: Any, what: str) -> None:
    """Check that `load` can read a value back, before it is saved.

    Args:
        value: Nested dictionaries, lists, tuples and sets.
        what: What it is, for the error.

    Raises:
        TypeError: Naming the item that `load` would reject, and its type.
    """
    for where, part in _unusual_items(value, ""):
        buffer = io.BytesIO()
        try:
            serialize(part, buffer, safe_serialization=False)
            buffer.seek(0)
            load(buffer, map_location="cpu")
        except Exception as error:
            kind = f"{type(part).__module__}.{type(part).__qualname__}"
            raise TypeError(
                f"{what} holds {reprlib.repr(part)} of type {kind} at {where or 'its top level'}, which cannot be loaded without running "
                "code from the file: save int, float, bool, str, tensors and containers of these instead, or allow the type "
                f"with torch.serialization.add_safe_globals([{type(part).__qualname__}]) before saving and loading"
            ) from error


def _unusual_items(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Items of a nested value that are not of plain types, with their paths; only a trial tells whether they load."""
    kind = type(value)
    if kind in (dict, collections.OrderedDict, collections.Counter):
        for key, inner in value.items():
            yield from _unusual_items(key, f"{where} key {key!r}")
            yield from _unusual_items(inner, f"{where}[{key!r}]")
    elif kind in (list, tuple, set, torch.Size):
        for index, inner in enumerate(value):
            yield from _unusual_items(inner, f"{where}[{index}]")
    elif kind not in PLAIN_TYPES:
        yield where, value
