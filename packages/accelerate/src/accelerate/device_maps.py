"""Models that a `device_map` has placed: which of them can be trained, and which must not be moved."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from accel_state.devices import resolve_device
from accel_state.environment import str_to_bool
from accel_state.hardware import is_xpu_available
from accel_state.libraries import is_bitsandbytes_multi_backend_available


def check_quantized(model: nn.Module, device: torch.device) -> None:
    """Check that a model with 8-bit or 4-bit layers is where it can be trained; it is never moved.

    Args:
        model: Any model; one that is not quantized, or has no `hf_device_map`, passes.
        device: The device of this process.

    Raises:
        ValueError: Modules are offloaded to where quantized layers cannot compute, or all are on another device.
    """
    bits, places = _quantized_bits(model), _places(model)
    elsewhere = sorted({"cpu", "disk"} & {str(place) for place in places})
    computes_on_cpu = is_bitsandbytes_multi_backend_available()
    if bits and elsewhere and not (computes_on_cpu or is_xpu_available()):
        raise ValueError(
            f"{type(model).__name__} was loaded in {bits} bits with modules offloaded to {' and '.join(elsewhere)}, and "
            "cannot be trained with CPU or disk offload. Load all of it on the device on which you train, for example "
            'with device_map={"": torch.cuda.current_device()}.'
        )
    if not bits or len(places) != 1 or (device.type == "cpu" and computes_on_cpu):
        return
    (place,) = places
    model_device = torch.device(device.type, place) if isinstance(place, int) else torch.device(place)
    if resolve_device(model_device) != resolve_device(device):
        raise ValueError(
            f"{type(model).__name__} was loaded in {bits} bits on {str(model_device)!r}, but this process trains on "
            f"{str(device)!r}. Load it there, for example with "
            'device_map={"": PartialState().device}.'
        )


def is_loaded_by_map(model: nn.Module) -> bool:
    """Whether a model with 8-bit or 4-bit layers was placed by a `device_map`: such layers may refuse to be moved."""
    return bool(_quantized_bits(model) and _places(model))


def _quantized_bits(model: nn.Module) -> int | None:
    """8 or 4, as the libraries that load such models note it; None for others."""
    return next((bits for bits in (8, 4) if getattr(model, f"is_loaded_in_{bits}bit", False)), None)


def _places(model: nn.Module) -> set[Any]:
    return set((getattr(model, "hf_device_map", None) or {}).values())


def check_not_dispatched(model: nn.Module, num_processes: int) -> None:
    """Raise for a model that a `device_map` dispatched to several devices, where there are several processes.

    Raises:
        ValueError: Unless the environment variable `ACCELERATE_BYPASS_DEVICE_MAP` is true.
    """
    if not str_to_bool(os.environ.get("ACCELERATE_BYPASS_DEVICE_MAP", "false")):
        raise ValueError(
            f"{type(model).__name__} was loaded with a device_map over several devices, which cannot be trained on "
            f"{num_processes} processes. Launch one process, or load the model without device_map. Set "
            "ACCELERATE_BYPASS_DEVICE_MAP=true if you know that it fits."
        )


def is_dispatched(model: nn.Module) -> bool:
    """Whether a `device_map` dispatched the model, or a submodule of it, to several devices."""
    return any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules())
