"""Moving models to a device, also those with DTensors, which stay where their mesh is."""

from __future__ import annotations

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
    moved: dict[int, tuple[Any, Any]] = {}  # modules may share tensors; old ones are kept, so that no id is reused
    for module in model.modules():
        for kind in (module._parameters, module._buffers):
            for name, tensor in list(kind.items()):
                if tensor is not None and to_local(tensor) is tensor and tensor.device != device:
                    if id(tensor) not in moved:
                        moved[id(tensor)] = tensor, _moved(tensor, device)
                    kind[name] = moved[id(tensor)][1]
    return model


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
