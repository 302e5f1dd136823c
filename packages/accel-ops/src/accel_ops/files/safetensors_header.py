"""Reading, checking and writing the header of a safetensors file, without torch and without reading tensor data.

A file is eight bytes with the length of the header, the header (JSON: name to dtype, shape and data offsets, and
metadata), and the tensors one behind the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import torch

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
"""The names of dtypes in safetensors files that can be written."""

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()} | {"F8_E8M0": torch.float8_e8m0fnu}
"""The dtypes that can be read, by their names in safetensors files."""


LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
ALIGNMENT_BYTES = 8
METADATA = "__metadata__"
DTYPE_BITS: dict[str, int] = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8, "F6_E3M2": 6, "F6_E2M3": 6, "F4": 4,
}  # fmt: skip
"""Bits of one element by the format's name of a dtype; torch lacks some of them."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """The header's entry of one tensor.

    Attributes:
        name: The tensor's name.
        dtype: As the format spells it, such as `"BF16"`.
        shape: Its shape.
        begin: Where its data begin, in bytes from the start of the file.
        end: Where they end.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_values(self) -> int:
        """Its number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Its size in the file, in bytes."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The header of one file.

    Attributes:
        tensors: Name to tensor, in the file's order of names.
        metadata: The file's own strings, such as `{"format": "pt"}`.
        data_begin: Where the data of tensors begin, in bytes from the start of the file.
        file_bytes: The size of the file.
    """

    tensors: dict[str, TensorHeader]
    metadata: dict[str, str]
    data_begin: int
    file_bytes: int


def read_header(path: str | os.PathLike[str]) -> SafetensorsHeader:
    """Read and check the header of a file, but not that the file is complete.

    Raises:
        ValueError: The file is damaged or not a safetensors file; the message names the tensor, if one is damaged.
        OSError: It cannot be read.
    """
    path = os.fspath(path)
    with open(path, "rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if file_bytes < LENGTH_BYTES or not 1 < length <= MAX_HEADER_BYTES:
            raise_damaged(path, "it does not begin with the length of a header")
        if LENGTH_BYTES + length > file_bytes:
            raise_damaged(
                path, f"it is truncated in its header: {file_bytes - LENGTH_BYTES} of {length} bytes are there"
            )
        text = file.read(length)
    try:
        entries = json.loads(text, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise_damaged(path, f"its header cannot be read ({error})")
    if not isinstance(entries, dict):
        raise_damaged(path, "its header is not a table of tensors")
    metadata = entries.pop(METADATA, {})
    data_begin = LENGTH_BYTES + length
    return SafetensorsHeader(
        {name: _tensor_header(path, name, entry, data_begin) for name, entry in entries.items()},
        metadata if isinstance(metadata, dict) else {},
        data_begin,
        file_bytes,
    )


def check_layout(path: str, header: SafetensorsHeader) -> None:
    """Check that the tensors lie one behind the other, without gaps, up to the end of the file.

    Raises:
        ValueError: They do not; the message names the tensor.
    """
    position = header.data_begin
    for name, tensor in sorted(header.tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.end > header.file_bytes:
            raise_damaged(
                path,
                f"it is truncated: the tensor {name!r} ends {tensor.end - header.file_bytes} bytes behind its end",
            )
        if tensor.begin < position:
            raise_damaged(path, f"the tensor {name!r} overlaps another one")
        if tensor.begin > position:
            raise_damaged(path, f"there are {tensor.begin - position} bytes of nothing before the tensor {name!r}")
        position = tensor.end
    if position != header.file_bytes:
        raise_damaged(path, f"{header.file_bytes - position} bytes at its end belong to no tensor")


def encode_header(tensors: Iterable[tuple[str, str, Iterable[int], int]], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file, up to the data of its first tensor.

    Args:
        tensors: Name, dtype as the format spells it, shape and bytes of each, in the order in which their data follow.
        metadata: Strings for the header.
    """
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape, num_bytes in tensors:
        begin, end = end, end + num_bytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def raise_damaged(path: str, problem: str) -> NoReturn:
    """Raise the ValueError for a damaged file."""
    raise ValueError(f"{path} is damaged or not a safetensors file: {problem}. Download or write it again.")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return entries


def _tensor_header(path: str, name: str, entry: Any, data_begin: int) -> TensorHeader:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise_damaged(path, f"of the tensor {name!r} it does not say dtype, shape and data_offsets")
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise_damaged(path, f"the tensor {name!r} has the dtype {dtype!r}; known are {', '.join(DTYPE_BITS)}")
    if not (isinstance(shape, list) and all(map(_is_count, shape)) and _is_count(begin) and _is_count(end)):
        raise_damaged(path, f"the tensor {name!r} has the shape {shape!r} and the data_offsets {[begin, end]!r}")
    num_bytes = (prod(shape) * bits + 7) // 8
    if num_bytes != end - begin:
        raise_damaged(
            path,
            f"the tensor {name!r} of shape {tuple(shape)} and dtype {dtype} takes {num_bytes} bytes, but {end - begin} "
            "are given to it",
        )
    return TensorHeader(name, dtype, tuple(shape), data_begin + begin, data_begin + end)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
