"""How large a model is in each dtype, and to train it with Adam."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "float8": 8, "int8": 8, "int4": 4}
HALF = ("float16", "bfloat16")
NOT_USUAL = -1


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes of a model in float32.

    Attributes:
        total: All parameters and buffers, tied ones once.
        largest_layer: The largest part that must be on one device.
        layer_names: Where that is found.
    """

    total: int
    largest_layer: int
    layer_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FormatRow:
    """What a model needs in one dtype, in bytes.

    Attributes:
        dtype: The format.
        largest_layer: As in `ModelSize`.
        total: As in `ModelSize`.
        training: What each part of training with Adam needs; -1 where training in the format is not usual.
    """

    dtype: str
    largest_layer: float
    total: float
    training: dict[str, float]

    @property
    def adam(self) -> float:
        """The most that training with Adam needs at a time, or -1."""
        return max(self.training.values())


def format_rows(size: ModelSize, dtypes: list[str]) -> list[FormatRow]:
    """Give the sizes in several dtypes."""
    rows = []
    for dtype in dtypes:
        share = BITS[dtype] / BITS["float32"] if dtype != "float32" else 1
        training = estimate_training_usage(size.total, dtype)
        rows.append(FormatRow(dtype, size.largest_layer * share, size.total * share, training))
    return rows


def estimate_training_usage(bytes: float, mixed_precision: str, msamp_config: str | None = None) -> dict[str, float]:
    """Estimate what training with Adam and a batch of one needs.

    Args:
        bytes: Size of the model in float32.
        mixed_precision: `"float32"`, `"float16"` or `"bfloat16"`; others are not for training.
        msamp_config: No longer of use.

    Returns:
        Bytes for the `model`, its `gradients`, the `optimizer` and the `step`; -1 for each in other formats. In half
        precision there is a float32 model, half a copy of it, and gradients in both.
    """
    if mixed_precision == "float32":
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes, "step": bytes * 4}
    if mixed_precision in HALF:
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes + bytes / 2, "step": bytes * 2}
    return dict.fromkeys(("model", "optimizer", "gradients", "step"), NOT_USUAL)


def measure_model(model: nn.Module) -> ModelSize:
    """Add up a model that was built in float32."""
    from accel_bigmodel.sizes import calculate_maximum_sizes

    total, (largest, names) = calculate_maximum_sizes(model)
    return ModelSize(total, largest, tuple(names))


def measure_folder(folder: Path) -> ModelSize:
    """Add up the safetensors files of a folder, as if their values were float32.

    Raises:
        UsageError: A file is damaged.
    """
    from accel_cli.estimate.headers import largest_layer, read_headers

    headers = read_headers(folder)
    values, name = largest_layer(headers)
    return ModelSize(4 * sum(header.num_values for header in headers), 4 * values, (name,))
