"""The same start for processes that share a model: equal weights, and equal random numbers."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_ops.modules import local_part

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


def make_alike(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all processes of a mesh the weights and the random states of its first.

    Without equal random states, dropout would take other elements on every process from what they share.

    Args:
        model: The model; of distributed tensors, nothing is sent.
        mesh: One-dimensional.
    """
    group = mesh.get_group()
    for tensor in chain(model.parameters(), model.buffers()):
        if local_part(tensor) is tensor and not tensor.is_meta:
            send_to_group(tensor, group)
    share_random_state(mesh)


def send_to_group(tensor: torch.Tensor, group: Any) -> None:
    """Overwrite a tensor of any device with that of the first process of a group."""
    device = group_device(group)
    on_wire = tensor.detach().contiguous().to(device)
    dist.broadcast(on_wire, group=group, group_src=0)
    if on_wire.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(on_wire)


def sum_over_group(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of a tensor over the processes of a group, on the tensor's device; the tensor stays what it is."""
    total = tensor.detach().clone().to(group_device(group))
    dist.all_reduce(total, group=group)
    return total.to(tensor.device)


def group_device(group: Any) -> torch.device:
    """Where the group's collectives find their tensors."""
    if dist.get_backend(group) in ("gloo", "mpi"):
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator() or "cpu")


def share_random_state(mesh: DeviceMesh) -> None:
    """Have all processes of a one-dimensional mesh draw the numbers that its first one draws from now on."""
    group = mesh.get_group()
    owners: list[Any] = [torch]
    if mesh.device_type != "cpu":
        owners.append(torch.get_device_module(mesh.device_type))
    for owner in owners:
        state = owner.get_rng_state()
        send_to_group(state, group)
        owner.set_rng_state(state)
