"""Device maps without needless entries."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, TypeVar

Map = TypeVar("Map", bound=MutableMapping[str, Any])


def clean_device_map(device_map: Map, module_name: str = "") -> Map:
    """Name a module instead of all its parts where these are on one device.

    Args:
        device_map: Device by name; it is changed.
        module_name: Where to begin.

    Returns:
        The same map.
    """
    prefix = f"{module_name}." if module_name else ""
    inside = {name: device for name, device in device_map.items() if name.startswith(prefix)}
    devices = set(inside.values())
    if len(devices) == 1 and len(inside) > 1:
        for name in inside:
            del device_map[name]
        device_map[module_name] = devices.pop()
        return device_map
    for child in dict.fromkeys(name[len(prefix) :].partition(".")[0] for name in inside if name != module_name):
        if prefix + child not in device_map:
            clean_device_map(device_map, prefix + child)
    return device_map
