"""The size of a model in each dtype, and the memory to train it with Adam."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "float8": 8, "int8": 8, "int4": 4}
HALF = ("float16", "bfloat16")
NOT_USUAL = -1
QUANTIZED = ("int8", "int4")
ADAPTER_SHARE = 0.01
"""Parameters of LoRA adapters, as a share of those of the model: rank 16 on all linear layers of Llama 7B is 0.6 %."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes of a model in float32.

    Attributes:
        total: All parameters and buffers, tied ones once.
        largest_layer: The largest module that must be on one device.
        layer_names: Its names.
    """

    total: int
    largest_layer: int
    layer_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FormatRow:
    """The memory of a model in one dtype, in bytes.

    Attributes:
        dtype: Name of the dtype.
        largest_layer: As in `ModelSize`.
        total: As in `ModelSize`.
        training: The memory of training with Adam, by kind; of adapters for int8 and int4. -1 for float8.
    """

    dtype: str
    largest_layer: float
    total: float
    training: dict[str, float]

    @property
    def adam(self) -> float:
        """The peak memory of training with Adam, or -1."""
        return max(self.training.values())


def format_rows(size: ModelSize, dtypes: list[str]) -> list[FormatRow]:
    """The sizes in several dtypes."""
    rows = []
    for dtype in dtypes:
        share = BITS[dtype] / BITS["float32"] if dtype != "float32" else 1
        estimate = adapter_training_usage if dtype in QUANTIZED else estimate_training_usage
        training = estimate(size.total, dtype)
        rows.append(FormatRow(dtype, size.largest_layer * share, size.total * share, training))
    return rows


def estimate_training_usage(bytes: float, mixed_precision: str, msamp_config: str | None = None) -> dict[str, float]:
    """Estimate the memory of training with Adam and a batch size of 1.

    Args:
        bytes: Size of the model in float32.
        mixed_precision: `"float32"`, `"float16"` or `"bfloat16"`; others are not for training.
        msamp_config: Ignored.

    Returns:
        Bytes for the `model`, its `gradients`, the `optimizer` and the `step`; -1 for each in other dtypes. Half precision
        means a model in float32, a copy in half precision, and gradients in both.
    """
    if mixed_precision == "float32":
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes, "step": bytes * 4}
    if mixed_precision in HALF:
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes + bytes / 2, "step": bytes * 2}
    return dict.fromkeys(("model", "optimizer", "gradients", "step"), NOT_USUAL)


def adapter_training_usage(bytes: float, dtype: str) -> dict[str, float]:
    """Estimate the memory of training LoRA adapters in float32 with Adam, on frozen weights of 8 or 4 bits.

    Args:
        bytes: Size of the model in float32.
        dtype: `"int8"` or `"int4"`.

    Returns:
        As `estimate_training_usage`; `step` is the sum.
    """
    adapters = ADAPTER_SHARE * bytes
    model = bytes * BITS[dtype] / BITS["float32"] + adapters
    return {"model": model, "optimizer": 2 * adapters, "gradients": adapters, "step": model + 3 * adapters}


def measure_model(model: nn.Module) -> ModelSize:
    """The size of a model that was built in float32."""
    from accel_bigmodel.sizes import calculate_maximum_sizes

    total, (largest, names) = calculate_maximum_sizes(model)
    return ModelSize(total, largest, tuple(names))


def measure_folder(folder: Path) -> ModelSize:
    """The size of the model in the safetensors files of a folder, in float32.

    Raises:
        UsageError: A file is damaged.
    """
    from accel_cli.estimate.headers import largest_layer, read_headers

    headers = read_headers(folder)
    values, name = largest_layer(headers)
    return ModelSize(4 * sum(header.num_values for header in headers), 4 * values, (name,))
