"""Are the devices of a device map devices, and can this machine use them?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accel_state.devices import detect_device_kind

NEEDS_NOTHING = ("cpu", "meta")  # devices that every machine has


def check_places(device_map: Mapping[str, Any]) -> None:
    """Refuse a device map whose keys are no names, or whose values are no devices of this machine.

    Args:
        device_map: Device by name of module or tensor; `"disk"` counts as one.

    Raises:
        TypeError: It is no mapping.
        ValueError: Naming the first entry that cannot be used, and why.
    """
    if not isinstance(device_map, Mapping):
        raise TypeError(
            f"device_map={device_map!r} is no mapping from names of modules to devices. To put the whole model on one "
            "device, pass {'': device}."
        )
    usable: set[torch.device] = set()
    for name, place in device_map.items():
        if not isinstance(name, str):
            raise ValueError(f"The device map has the key {name!r}: keys are names of modules or tensors, as str.")
        if place == "disk":
            continue
        device = _device_of(name, place)
        if device not in usable:
            check_usable(device, name)
            usable.add(device)


def check_usable(device: torch.device, name: str = "") -> None:
    """Refuse a device that this machine does not have.

    Args:
        device: The device.
        name: What of the model the device map puts there, for the error.

    Raises:
        ValueError: Naming the device, and what there is instead.
    """
    if device.type in NEEDS_NOTHING:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        kind = detect_device_kind()
        count = 0 if kind.name == "cpu" else kind.device_count()
        here = f"{count} {kind.name} device{'s' * (count != 1)}" if count else "no accelerator"
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"The device map names {str(device)!r}{f' for {name!r}' if name else ''}, which this machine cannot use: it "
            f"has {here} ({reason}). Use 'cpu' or 'disk', or let device_map='auto' choose."
        ) from error


def _device_of(name: str, place: Any) -> torch.device:
    wrong = f"The device map puts {name!r} on {place!r}, which is no device"
    advice = "give the number of an accelerator, 'cpu', 'disk', or what torch.device takes."
    if isinstance(place, bool) or not isinstance(place, int | str | torch.device):
        raise ValueError(f"{wrong}: {advice}")
    try:
        return torch.device(place)
    except RuntimeError as error:
        raise ValueError(f"{wrong} ({str(error).partition(chr(10))[0][:60]}): {advice}") from None
