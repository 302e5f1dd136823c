"""Bounding gradients of which some are distributed: each process looks at its own parts, and norms are added up."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from accel_ops.modules import to_local
from accel_ops.transport import collective_device


@dataclass
class GradientGroup:
    """Parts of gradients that are divided between the same processes.

    Attributes:
        parts: What this process holds, any shapes.
        process_groups: Those over which norms must be added up; none for gradients that every process has whole.
    """

    parts: list[torch.Tensor] = field(default_factory=list)
    process_groups: Sequence[Any] = ()


def clip_grad_norm_(
    parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale gradients, distributed or not, so that their joint norm is at most `max_norm`.

    All processes that share a distributed gradient must call this.

    Args:
        parameters: Whose gradients; their meshes and placements may differ.
        max_norm: The bound.
        norm_type: Which norm; infinity for the largest element.

    Returns:
        The norm before, 0-dim, the same on all processes.
    """
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    kind = sys.modules.get("torch.distributed.tensor")  # this runs at every step, so no function per parameter
    for parameter in chosen if kind is not None else ():
        if isinstance(parameter, kind.DTensor):  # type: ignore[union-attr]
            return clip_groups_(group_gradients(gradients_of(chosen)), max_norm, norm_type)
    return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type=norm_type)


def clip_grad_value_(parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
    """Clamp every element of the gradients, distributed or not, to `[-clip_value, clip_value]`."""
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    for parts in _by_device([to_local(gradient) for gradient in gradients_of(chosen)]):
        torch._foreach_clamp_min_(parts, -clip_value)
        torch._foreach_clamp_max_(parts, clip_value)


def group_gradients(gradients: Iterable[torch.Tensor]) -> list[GradientGroup]:
    """Sort gradients by the processes that they are divided between.

    Args:
        gradients: Distributed tensors, none of them a partial sum, and others.
    """
    groups: dict[Any, GradientGroup] = {}
    for gradient in gradients:
        part = to_local(gradient)
        key: Any = ()
        if part is not gradient:
            mesh, placements = gradient.device_mesh, gradient.placements  # type: ignore[attr-defined]
            key = (mesh, tuple(dim for dim, placement in enumerate(placements) if not placement.is_replicate()))
        if key not in groups:
            groups[key] = GradientGroup(process_groups=[key[0].get_group(dim) for dim in key[1]] if key else ())
        groups[key].parts.append(part)
    return list(groups.values())


def clip_groups_(groups: Sequence[GradientGroup], max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale the gradients of several groups by one factor; see `clip_grad_norm_`."""
    total = joint_norm(groups, norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parts in _by_device([part for group in groups for part in group.parts]):
        torch._foreach_mul_(parts, factor.to(parts[0].device))
    return total


def joint_norm(groups: Sequence[GradientGroup], norm_type: float) -> torch.Tensor:
    """The norm of all gradients of several groups together, 0-dim float32."""
    largest = math.isinf(norm_type)
    totals = [_sum_of_powers(group, norm_type) for group in groups]
    if not totals:
        return torch.tensor(0.0)
    stacked = torch.stack([total.to(totals[0].device) for total in totals])
    return stacked.max() if largest else stacked.sum() ** (1.0 / norm_type)


def _sum_of_powers(group: GradientGroup, norm_type: float) -> torch.Tensor:
    """The sum of the elements' absolute values to the power of `norm_type`, or the largest of them; 0-dim."""
    largest = math.isinf(norm_type)
    device = group.parts[0].device if group.parts else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float32, device=device)
    for parts in _by_device([part for part in group.parts if part.numel()]):
        norms = torch.stack(torch._foreach_norm(parts, norm_type)).float()
        of_device = norms.max() if largest else (norms**norm_type).sum()
        total = torch.maximum(total, of_device.to(device)) if largest else total + of_device.to(device)
    for process_group in group.process_groups:
        on_wire = total.to(collective_device(process_group))
        dist.all_reduce(on_wire, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=process_group)
        total = on_wire.to(device)
    return total


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of those parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _by_device(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    yield from found.values()
