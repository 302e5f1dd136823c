"""The arguments of `torch.load` that a program may give to `load_state`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accel_ops.files.serialization import LOAD_OPTIONS


def torch_load_arguments(
    load_kwargs: Mapping[str, Any] | None, map_location: Any, device: torch.device
) -> tuple[Any, dict[str, Any]]:
    """Divide `load_kwargs` into where tensors of optimizers go and the other arguments of `torch.load`.

    Args:
        load_kwargs: As for `Accelerator.load_state`. Its `map_location` may be anything that `torch.load` takes.
        map_location: None, "cpu" or "on_device", when it is not in `load_kwargs`.
        device: The device of this process.

    Raises:
        ValueError: The arguments would run code from a file.
        TypeError: `torch.load` does not take one of them with `weights_only=True`.
    """
    options = dict(load_kwargs or {})
    if options.pop("weights_only", True) is not True or options.pop("pickle_module", None) is not None:
        raise ValueError(
            "load_state: weights_only=False and pickle_module are refused, because they run code from the checkpoint: leave them "
            "out, and allow classes that you trust with torch.serialization.add_safe_globals([...])."
        )
    if unknown := options.keys() - LOAD_OPTIONS - {"map_location"}:
        raise TypeError(
            f"load_state: load_kwargs has {min(unknown)!r}, which is not an argument of torch.load that can be used here. Choose "
            f"from {', '.join(sorted(LOAD_OPTIONS | {'map_location', 'weights_only'}))}."
        )
    location = options.pop("map_location", None)
    if location is None or location == "on_device":
        location = optimizer_location(location or map_location, device)
    return location, options


def optimizer_location(map_location: Any, device: torch.device) -> torch.device:
    """Where the tensors of an optimizer go while they are loaded.

    Raises:
        TypeError: `map_location` is none of None, "cpu" and "on_device".
    """
    if map_location not in (None, "cpu", "on_device"):
        raise TypeError(f"map_location={map_location!r} is not valid. Choose from None, 'cpu' and 'on_device'.")
    return device if map_location == "on_device" else torch.device("cpu")
