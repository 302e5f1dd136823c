"""Does a device map fit a model?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accel_state.warning import warn_user


def check_device_map(model: nn.Module, device_map: Mapping[str, Any], strict: bool = False) -> None:
    """Refuse a device map that leaves a tensor of the model out, and warn of names that the model has not.

    Args:
        model: The model.
        device_map: Device by name of module or tensor; `""` is the model.
        strict (`bool`): Refuse such names too.

    Raises:
        ValueError: With the names.
    """
    tensors = list(model.state_dict())
    known = {name for name, _ in model.named_modules()} | set(tensors)
    known |= {name for name, _ in model.named_buffers()}
    unknown = [name for name in device_map if name not in known]
    if unknown:
        from difflib import get_close_matches

        close = get_close_matches(unknown[0], sorted(known), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        message = (
            f"These device_map keys do not match any submodules of {type(model).__name__}: {_listed(unknown)}.{hint}"
        )
        if strict:
            raise ValueError(message)
        warn_user(message)
    if "" in device_map:
        return
    missing = [name for name in tensors if not _is_covered(name, device_map)]
    if missing:
        raise ValueError(
            f"The device map gives no device to {_listed(missing)}: add these names, or modules that hold them."
        )


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether two devices are one; an accelerator without a number is the first."""
    if first_device.type != second_device.type:
        return False
    if first_device.type in ("cpu", "meta"):
        return True
    return (first_device.index or 0) == (second_device.index or 0)


def _is_covered(name: str, device_map: Mapping[str, Any]) -> bool:
    while name:
        if name in device_map:
            return True
        name = name.rpartition(".")[0]
    return False


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
