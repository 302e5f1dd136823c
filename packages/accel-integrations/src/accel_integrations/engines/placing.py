"""Moving models to a device, also those with DTensors, which stay where their mesh is."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from accel_ops.modules import model_has_dtensor, to_local


def move_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device, in place.

    DTensors stay on the devices of their meshes: `Module.to` would swap them, which torch refuses for tensors that are
    referred to weakly, as by optimizers that are to be rebound. The other tensors of such a model are moved one by one.

    Args:
        model: Any model.
        device: The device of this process.

    Returns:
        The model.
    """
    if not model_has_dtensor(model):
        return model.to(device)
    move_plain_tensors(model, device)
    return model


def move_plain_tensors(model: nn.Module, device: torch.device, left_out: Collection[torch.Tensor] = ()) -> None:
    """Move the parameters and buffers of a model that are no DTensors to a device, in place.

    Args:
        model: Any model; tied parameters stay tied.
        device: The device of this process.
        left_out: Parameters to skip. Those on the meta device, which have no values, are skipped too.
    """
    skipped = {id(tensor) for tensor in left_out}
    moved: dict[int, tuple[Any, Any]] = {}  # modules may share tensors; old ones are kept, so that no id is reused
    for module in model.modules():
        for kind in (module._parameters, module._buffers):
            for name, tensor in list(kind.items()):
                if tensor is None or tensor.is_meta or tensor.device == device or id(tensor) in skipped:
                    continue
                if to_local(tensor) is not tensor:
                    continue
                if id(tensor) not in moved:
                    moved[id(tensor)] = tensor, _moved(tensor, device)
                kind[name] = moved[id(tensor)][1]


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device; a parameter stays the same object where devices can share its kind of object."""
    data = tensor.detach().to(device)
    if not isinstance(tensor, nn.Parameter):
        return data
    gradient, tensor.grad = tensor.grad, None
    if torch._has_compatible_shallow_copy_type(tensor, data):
        tensor.data = data
    else:
        tensor = nn.Parameter(data, tensor.requires_grad)
    tensor.grad = None if gradient is None else gradient.to(device)
    return tensor
