"""Equal replicas: the weights and random states of a group's first rank, on all of its ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from accel_ops.modules import to_local
from accel_ops.transport import collective_device

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_module_states(model: nn.Module, groups: Iterable[Any]) -> None:
    """Refuse a model whose first process has only shapes where values are needed; all processes call this.

    Args:
        model: The model.
        groups: The process groups along each dimension of the mesh, the first dimension first.

    Raises:
        ValueError: On all processes, naming the tensors.
    """
    names = [name for name, tensor in chain(model.named_parameters(), model.named_buffers()) if tensor.is_meta]
    for group in list(groups)[::-1]:
        found: list[Any] = [names]
        dist.broadcast_object_list(found, group=group, group_src=0, device=collective_device(group))
        names = found[0]
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ValueError(
            f"{type(model).__name__} has no values on the main process, from which all others get theirs: {shown} "
            "are on the meta device. Load the weights there before prepare(), for example with torch.load and "
            "load_state_dict(..., assign=True)."
        )


def sync_module_states(
    module: nn.Module,
    groups: Iterable[Any],
    device: torch.device | None = None,
    left_out: Collection[torch.Tensor] = (),
) -> None:
    """Broadcast a module's parameters and buffers from the first rank to all; DTensors stay as they are.

    So a rank that holds only shapes needs no more memory than the module's.

    Args:
        module: The module, changed in place.
        groups: The process groups along each dimension of the mesh, the first dimension first.
        device: Where tensors on the meta device get memory; None leaves them on the meta device.
        left_out: Parameters that stay as they are.
    """
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # holds the old ones too, so that no id is used again
    done = {id(tensor) for tensor in left_out}
    inside_first = list(groups)[::-1]  # so that the last word is that of the very first process
    for owner, name, tensor in _tensors_of(module):
        if id(tensor) in made:  # a tied one
            _put(owner, name, made[id(tensor)][1])
        if id(tensor) in done or to_local(tensor) is not tensor or (tensor.is_meta and device is None):
            continue
        kept = tensor
        if tensor.is_meta:
            kept = torch.empty_like(tensor, device=device)
            if isinstance(tensor, nn.Parameter):
                kept = nn.Parameter(kept, requires_grad=tensor.requires_grad)
            _put(owner, name, kept)
            made[id(tensor)] = (tensor, kept)
        done |= {id(tensor), id(kept)}
        for group in inside_first:
            broadcast_to_group(kept, group)


def _tensors_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for part in module.modules():
        for name, tensor in chain(list(part._parameters.items()), list(part._buffers.items())):
            if tensor is not None:
                yield part, name, tensor


def _put(owner: nn.Module, name: str, tensor: torch.Tensor) -> None:
    kind = owner._parameters if name in owner._parameters else owner._buffers
    kind[name] = tensor  # type: ignore[assignment]


def broadcast_to_group(tensor: torch.Tensor, group: Any) -> None:
    """Overwrite a tensor of any device with that of the first rank of a group."""
    device = collective_device(group)
    on_wire = tensor.detach().contiguous().to(device)
    dist.broadcast(on_wire, group=group, group_src=0)
    if on_wire.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(on_wire)


def all_reduce_over_group(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of a tensor over the ranks of a group, on the tensor's device; the tensor stays what it is."""
    total = tensor.detach().clone().to(collective_device(group))
    dist.all_reduce(total, group=group)
    return total.to(tensor.device)


def sync_random_state(mesh: DeviceMesh) -> None:
    """Broadcast the random states of the first rank of a one-dimensional mesh, so that dropout drops the same elements."""
    group = mesh.get_group()
    owners: list[Any] = [torch]
    if mesh.device_type != "cpu":
        owners.append(torch.get_device_module(mesh.device_type))
    for owner in owners:
        state = owner.get_rng_state()
        broadcast_to_group(state, group)
        owner.set_rng_state(state)
