"""Sizes of tensors from the headers of safetensors files; no tensor is read."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_cli.errors import UsageError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
BITS: dict[str, int] = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8, "F6_E3M2": 6, "F6_E2M3": 6, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file says about a tensor.

    Attributes:
        name: Of the tensor.
        dtype: As the format spells it, such as `"BF16"`.
        shape: Of the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """What it takes as it is stored."""
        return (self.num_values * BITS[self.dtype] + 7) // 8


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder."""
    return sorted(folder.glob("*.safetensors"))


def read_headers(folder: Path) -> list[TensorHeader]:
    """List the tensors of a folder's safetensors files.

    Raises:
        UsageError: A file is damaged.
    """
    return [header for path in weight_files(folder) for header in read_header(path)]


def read_header(path: Path) -> list[TensorHeader]:
    """List the tensors of a safetensors file.

    Raises:
        UsageError: The file is damaged.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, path.stat().st_size - 8):
                raise ValueError(f"its header would have {length} bytes")
            entries = json.loads(file.read(length))
        return [_tensor_header(name, entry) for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} is damaged or no safetensors file ({error}): download it again") from error


def _tensor_header(name: str, entry: Any) -> TensorHeader:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if dtype not in BITS:
        raise ValueError(f"{name!r} has the dtype {dtype!r}")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{name!r} has the shape {list(shape)!r}")
    return TensorHeader(name, dtype, shape)


def largest_layer(headers: list[TensorHeader]) -> tuple[int, str]:
    """Number of values in the largest layer, and its name.

    Layers are told from names: tensors of `model.layers.3.*` belong together, others go by the module they are in.
    """
    layers: dict[str, int] = {}
    for header in headers:
        parts = header.name.split(".")
        numbers = [position for position, part in enumerate(parts) if part.isdigit()]
        layer = ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1])
        layers[layer] = layers.get(layer, 0) + header.num_values
    return max(((size, name) for name, size in layers.items()), default=(0, ""))
