"""Whether devices have the memory that a device map asks of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accel_bigmodel.sizes import named_module_tensors


def check_memory(needed: Mapping[torch.device, int]) -> None:
    """Refuse a map before anything moves.

    Args:
        needed: Bytes that are to come to each device.

    Raises:
        ValueError: Naming the devices that cannot take it, and by how much.
    """
    lacking = []
    for device, num_bytes in needed.items():
        free = free_bytes(device) if num_bytes else None
        if free is not None and num_bytes > free:
            lacking.append(
                f"{num_bytes / 1e9:.2f} GB are to go to {device}, where {free / 1e9:.2f} GB are free: "
                f"{(num_bytes - free) / 1e9:.2f} GB too many"
            )
    if lacking:
        raise ValueError(
            f"The device map does not fit into memory: {'; '.join(lacking)}. Let infer_auto_device_map make a map for "
            "what is free (max_memory), or give more parts to 'disk' or to another device."
        )


def free_bytes(device: torch.device) -> int | None:
    """What a device can still take; None where it does not say."""
    if device.type == "cpu":
        import psutil

        return int(psutil.virtual_memory().available + psutil.swap_memory().free)
    module: Any = torch.get_device_module(device) if device.type != "meta" else None
    if not hasattr(module, "mem_get_info") or not module.is_available():
        return None
    unused = module.memory_reserved(device) - module.memory_allocated(device)  # which torch keeps for new tensors
    return int(module.mem_get_info(device)[0] + unused)


def bytes_to_move(model: nn.Module, devices: Mapping[str, Any]) -> dict[torch.device, int]:
    """What has to come to each device when parts of a model go where they are to be; shared tensors count once.

    Args:
        model: The model, in memory.
        devices: Device by name of part; those left out stay where they are.
    """
    found: dict[torch.device, int] = {}
    seen: set[tuple[int, torch.device]] = set()
    for name, tensor in named_module_tensors(model, recurse=True):
        place = name
        while place and place not in devices:
            place = place.rpartition(".")[0]
        if place not in devices or tensor.is_meta:
            continue
        device = torch.device(devices[place])
        if device != tensor.device and (tensor.data_ptr(), device) not in seen:
            seen.add((tensor.data_ptr(), device))
            found[device] = found.get(device, 0) + tensor.nbytes
    return found
