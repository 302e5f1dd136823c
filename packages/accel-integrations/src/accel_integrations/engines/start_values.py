"""Values of the first process for all: those of modules that the others hold too, or of which they hold only shapes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel_integrations.parallel.alike import group_device, send_to_group
from accel_ops.modules import local_part


def check_start_values(model: nn.Module, groups: Iterable[Any]) -> None:
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
        dist.broadcast_object_list(found, group=group, group_src=0, device=group_device(group))
        names = found[0]
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ValueError(
            f"{type(model).__name__} has no values on the main process, from which all others get theirs: {shown} "
            "are on the meta device. Load the weights there before prepare(), for example with torch.load and "
            "load_state_dict(..., assign=True)."
        )


def share_start_values(
    module: nn.Module, groups: Iterable[Any], device: torch.device, left_out: Collection[torch.Tensor] = ()
) -> None:
    """Give all processes the first one's values of a module, where they are not distributed yet.

    Tensors on the meta device get memory. So a process that holds only shapes needs no more memory than the module's.

    Args:
        module: The module, changed in place.
        groups: The process groups along each dimension of the mesh, the first dimension first.
        device: Where memory is made.
        left_out: Parameters that stay as they are.
    """
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # holds the old ones too, so that no id is used again
    done = {id(tensor) for tensor in left_out}
    inside_first = list(groups)[::-1]  # so that the last word is that of the very first process
    for owner, name, tensor in _tensors_of(module):
        if id(tensor) in made:  # a tied one
            _put(owner, name, made[id(tensor)][1])
        if id(tensor) in done or local_part(tensor) is not tensor:
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
            send_to_group(kept, group)


def _tensors_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for part in module.modules():
        for name, tensor in chain(list(part._parameters.items()), list(part._buffers.items())):
            if tensor is not None:
                yield part, name, tensor


def _put(owner: nn.Module, name: str, tensor: torch.Tensor) -> None:
    kind = owner._parameters if name in owner._parameters else owner._buffers
    kind[name] = tensor  # type: ignore[assignment]
