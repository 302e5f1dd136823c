"""Sizes of tensors from the headers of safetensors files; no tensor is read."""

from __future__ import annotations

from pathlib import Path

from accel_cli.errors import UsageError
from accel_ops.files.safetensors_header import TensorHeader, read_header


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder."""
    return sorted(folder.glob("*.safetensors"))


def read_headers(folder: Path) -> list[TensorHeader]:
    """List the tensors of a folder's safetensors files.

    Raises:
        UsageError: A file is damaged.
    """
    try:
        return [tensor for path in weight_files(folder) for tensor in read_header(path).tensors.values()]
    except ValueError as error:
        raise UsageError(str(error)) from error


def largest_layer(headers: list[TensorHeader]) -> tuple[int, str]:
    """Number of values in the largest layer, and its name.

    Layers are found by names: tensors of `model.layers.3.*` are one layer, others are grouped by their module.
    """
    layers: dict[str, int] = {}
    for header in headers:
        parts = header.name.split(".")
        numbers = [position for position, part in enumerate(parts) if part.isdigit()]
        layer = ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1])
        layers[layer] = layers.get(layer, 0) + header.num_values
    return max(((size, name) for name, size in layers.items()), default=(0, ""))
