"""Broadcasting module states (parameters and buffers) and random states from the first rank of a group."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from accel_integrations.parallel.wire import as_sent
from accel_ops.collectives.transport import collective_device
from accel_ops.modules import to_local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_module_states(model: nn.Module, groups: Iterable[Any]) -> None:
    """Check that the model of the first rank is not on the meta device; all ranks call this.

    Args:
        model: The model.
        groups: The process groups along each dimension of the mesh, the first dimension first.

    Raises:
        ValueError: It is, raised on all ranks; the message names the tensors.
    """
    names = [name for name, tensor in chain(model.named_parameters(), model.named_buffers()) if tensor.is_meta]
    for group in list(groups)[::-1]:
        payload: list[Any] = [names]
        dist.broadcast_object_list(payload, group=group, group_src=0, device=collective_device(group))
        names = payload[0]
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ValueError(
            f"{type(model).__name__} has no weights on the main process, which broadcasts them to all other ranks: "
            f"{shown} are on the meta device. Load the weights on the main process before prepare(), for example with "
            "torch.load and load_state_dict(..., assign=True)."
        )


def sync_module_states(
    module: nn.Module,
    groups: Iterable[Any],
    device: torch.device | None = None,
    left_out: Collection[torch.Tensor] = (),
) -> None:
    """Broadcast a module's parameters and buffers from the first rank to all; DTensors stay as they are.

    A rank whose module is on the meta device needs no more memory than the module itself.

    Args:
        module: The module, changed in place.
        groups: The process groups along each dimension of the mesh, the first dimension first.
        device: The device on which tensors on the meta device are allocated; None leaves them as they are.
        left_out: Parameters to skip.
    """
    # keeps the old tensors alive, so that no id is reused
    replacements: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    done = {id(tensor) for tensor in left_out}
    inside_first = list(groups)[::-1]  # the broadcast of the outermost group is the last
    for owner, name, tensor in _tensors_of(module):
        if id(tensor) in replacements:  # a tied one
            _put(owner, name, replacements[id(tensor)][1])
        if id(tensor) in done or to_local(tensor) is not tensor or (tensor.is_meta and device is None):
            continue
        target = tensor
        if tensor.is_meta:
            target = torch.empty_like(tensor, device=device)
            if isinstance(tensor, nn.Parameter):
                target = nn.Parameter(target, requires_grad=tensor.requires_grad)
            _put(owner, name, target)
            replacements[id(tensor)] = (tensor, target)
        done |= {id(tensor), id(target)}
        for group in inside_first:
            broadcast_to_group(target, group)


def _tensors_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for submodule in module.modules():
        for name, tensor in chain(list(submodule._parameters.items()), list(submodule._buffers.items())):
            if tensor is not None:
                yield submodule, name, tensor


def _put(owner: nn.Module, name: str, tensor: torch.Tensor) -> None:
    kind = owner._parameters if name in owner._parameters else owner._buffers
    kind[name] = tensor  # type: ignore[assignment]


def broadcast_to_group(tensor: torch.Tensor, group: Any) -> None:
    """Overwrite a tensor of any device with that of the first rank of a group."""
    device = collective_device(group)
    on_wire = tensor.detach().resolve_conj().resolve_neg().contiguous().to(device)
    dist.broadcast(as_sent(on_wire), group=group, group_src=0)
    if on_wire.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(on_wire)


def all_reduce_over_group(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """All-reduce a tensor (sum) over a group; returns a new tensor on the same device."""
    total = tensor.detach().clone().to(collective_device(group))
    dist.all_reduce(total, group=group)
    return total.to(tensor.device)


def sync_random_state(mesh: DeviceMesh) -> None:
    """Broadcast the random states of the first rank of a one-dimensional mesh, so that dropout is the same."""
    group = mesh.get_group()
    owners: list[Any] = [torch]
    if mesh.device_type != "cpu":
        owners.append(torch.get_device_module(mesh.device_type))
    for owner in owners:
        state = owner.get_rng_state()
        broadcast_to_group(state, group)
        owner.set_rng_state(state)
