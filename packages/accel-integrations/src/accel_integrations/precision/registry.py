"""Precisions by the value of `mixed_precision`; further ones are `accelerate.precisions` entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

from accel_integrations.precision.precision import Precision
from accel_state.accelerator_state import PRECISIONS as ENTRY_POINTS
from accel_state.devices import device_kind
from accel_state.settings.handlers import Handlers

PRECISIONS = {
    "no": "accel_integrations.precision.autocast:FullPrecision",
    "bf16": "accel_integrations.precision.autocast:BFloat16Precision",
    "fp16": "accel_integrations.precision.loss_scale:Float16Precision",
    "fp8": "accel_integrations.precision.float8:make_float8_precision",
}
"""What makes a precision from a type of device and the handlers, by its name."""
FOR_SHARDED_GRADIENTS = PRECISIONS | {"fp16": "accel_integrations.precision.loss_scale:sharded_float16"}
"""With sharded gradients, all ranks skip the same steps under float16."""


def make_precision(wanted: str, device_type: str, handlers: Handlers, *, sharded: bool = False) -> Precision:
    """The object for a value of `mixed_precision`.

    Args:
        wanted: "no", "bf16", "fp16" or "fp8".
        device_type: The type of device to compute on.
        handlers: How autocast and the scaler behave, and how 8-bit floats are scaled.
        sharded: Whether every rank holds a different shard of the gradients.

    Raises:
        NotImplementedError: For another value.
        MissingLibraryError: When the library that computes in it is not installed.
        ValueError: When the device cannot compute in it.
    """
    where = (FOR_SHARDED_GRADIENTS if sharded else PRECISIONS).get(wanted)
    make: Any = None if where is None else resolve_name(where)
    for entry in () if make is not None else entry_points(group=ENTRY_POINTS, name=wanted):
        make = entry.load()
    if make is None:
        raise NotImplementedError(
            f"mixed_precision={wanted!r} is not supported. Choose from {', '.join(map(repr, PRECISIONS))}."
        )
    supported = {"bf16": "supports_bf16", "fp16": "supports_fp16"}.get(wanted)
    if supported is not None and not getattr(device_kind(device_type), supported)():
        raise ValueError(
            f"mixed_precision={wanted!r} is not supported on this {device_type!r} device. Choose another precision, or "
            "another device (cpu=True)."
        )
    precision: Precision = make(device_type, handlers)
    return precision
