"""Moving nested structures between devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accel_ops.nested import honor_mapping, honor_type
from accel_state.warning import warn_user


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | list[str] | None = None
) -> Any:
    """Move a nested structure to a device.

    Args:
        tensor: A tensor, any object with a `to` method, or a nested structure of these; other leaves are returned unchanged.
        device: The target device.
        non_blocking (`bool`): Let the copy overlap with other work, where the object can do that.
        skip_keys (`str` or list of `str`, *optional*): Keys of mappings whose values are not moved.

    Returns:
        The same structure on the device.
    """
    kind = type(tensor)
    if kind is torch.Tensor:
        return tensor if tensor.device == device else tensor.to(device, non_blocking=non_blocking)
    if kind is list or kind is tuple:  # what loaders yield
        # a call less for each tensor that is there already: on a CPU, those of every batch
        return kind(
            [
                item
                if type(item) is torch.Tensor and item.device == device
                else send_to_device(item, device, non_blocking, skip_keys)
                for item in tensor
            ]
        )
    if kind is dict and not skip_keys:
        return {key: send_to_device(item, device, non_blocking) for key, item in tensor.items()}
    if hasattr(tensor, "to"):
        try:
            return tensor.to(device, non_blocking=non_blocking)
        except TypeError:  # a user's `to` without this argument
            return tensor.to(device)
    if isinstance(tensor, (tuple, list)):
        return honor_type(tensor, (send_to_device(item, device, non_blocking, skip_keys) for item in tensor))
    if isinstance(tensor, Mapping):
        skipped = [skip_keys] if isinstance(skip_keys, str) else skip_keys or []
        values = {
            key: item if key in skipped else send_to_device(item, device, non_blocking, skip_keys)
            for key, item in tensor.items()
        }
        return honor_mapping(tensor, values)
    if hasattr(kind, "__dataclass_fields__"):
        _warn_if_left(tensor, device)
    return tensor


def _warn_if_left(instance: Any, device: Any) -> None:
    """Warn of a dataclass with tensors elsewhere, which is a leaf to everything that walks through batches."""
    left = find_device(tuple(vars(instance).values())) if hasattr(instance, "__dict__") else None
    if left is not None and left.type != torch.device(device).type:
        name = type(instance).__name__
        warn_user(
            f"{name} is a dataclass without a `to` method, so that its tensors stay on {left} and are not moved to {device}. Give "
            f"{name} a method to(device) that returns a moved copy, or yield a dict or a NamedTuple."
        )


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor in a nested structure; None when there is no tensor."""
    if isinstance(data, torch.Tensor):
        return data.device
    items = data.values() if isinstance(data, Mapping) else data if isinstance(data, (tuple, list)) else ()
    for item in items:
        device = find_device(item)
        if device is not None:
            return device
    return None
