"""Gradient clipping with DTensors: each rank computes the norm of its own shards, then norms are all-reduced."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from accel_ops.collectives.transport import collective_device
from accel_ops.modules import to_local


@dataclass
class GradientGroup:
    """Gradients that are sharded over the same process groups.

    Attributes:
        shards: The shards of this rank, of any shapes.
        process_groups: Over which norms are all-reduced; empty for gradients that every rank holds in full.
    """

    shards: list[torch.Tensor] = field(default_factory=list)
    process_groups: Sequence[Any] = ()


def clip_grad_norm_(
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    only_finite: bool = False,
) -> torch.Tensor:
    """Clip the total norm of gradients, DTensors or not, to `max_norm`.

    All ranks that hold shards of a gradient must call this.

    Args:
        parameters: The parameters whose gradients are clipped; their meshes and placements may differ.
        max_norm: The largest norm allowed.
        norm_type: The p of the p-norm; infinity for the largest absolute value.
        only_finite: Leave gradients as they are where their norm is inf or NaN; else they become 0 and NaN, as in torch.

    Returns:
        The norm before clipping, 0-dim float32, the same on all ranks.
    """
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    kind = sys.modules.get("torch.distributed.tensor")  # this runs at every step, so no function per parameter
    for parameter in chosen if kind is not None else ():
        if isinstance(parameter, kind.DTensor):  # type: ignore[union-attr]
            return clip_groups_(group_gradients(gradients_of(chosen)), max_norm, norm_type, only_finite)
    if not only_finite:
        return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type=norm_type)
    gradients = gradients_of(chosen)
    with torch.no_grad():
        total = torch.nn.utils.get_total_norm(gradients, norm_type)
        scale_to_norm_(gradients, total, max_norm, only_finite)
    return total


def clip_grad_value_(parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
    """Clamp every element of the gradients, DTensors or not, to `[-clip_value, clip_value]`."""
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    for shards in by_device([to_local(gradient) for gradient in gradients_of(chosen)]):
        torch._foreach_clamp_min_(shards, -clip_value)
        torch._foreach_clamp_max_(shards, clip_value)


def group_gradients(gradients: Iterable[torch.Tensor]) -> list[GradientGroup]:
    """Group gradients by the process groups over which they are sharded.

    Args:
        gradients: DTensors, none with a `Partial` placement, and plain tensors.
    """
    groups: dict[Any, GradientGroup] = {}
    for gradient in gradients:
        shard = to_local(gradient)
        key: Any = ()
        if shard is not gradient:
            mesh, placements = gradient.device_mesh, gradient.placements  # type: ignore[attr-defined]
            key = (mesh, tuple(dim for dim, placement in enumerate(placements) if not placement.is_replicate()))
        if key not in groups:
            groups[key] = GradientGroup(process_groups=[key[0].get_group(dim) for dim in key[1]] if key else ())
        groups[key].shards.append(shard)
    return list(groups.values())


def clip_groups_(
    groups: Sequence[GradientGroup], max_norm: float, norm_type: float, only_finite: bool = False
) -> torch.Tensor:
    """Clip the total norm of the gradients of several groups; see `clip_grad_norm_`."""
    total = joint_norm(groups, norm_type)
    scale_to_norm_([shard for group in groups for shard in group.shards], total, max_norm, only_finite)
    return total


def scale_to_norm_(
    shards: Iterable[torch.Tensor], total: torch.Tensor, max_norm: float, only_finite: bool = False
) -> None:
    """Scale gradients in place, so that their total norm is at most `max_norm`.

    Args:
        shards: Local shards, of any shapes and on any devices.
        total: Their total norm now, 0-dim.
        max_norm: The largest norm allowed.
        only_finite: Leave them as they are where `total` is inf or NaN.
    """
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    if only_finite:
        factor = torch.where(total.isfinite(), factor, 1.0)
    for same in by_device(shards):
        torch._foreach_mul_(same, factor.to(same[0].device))


def joint_norm(groups: Sequence[GradientGroup], norm_type: float) -> torch.Tensor:
    """The total norm of the gradients of several groups, 0-dim float32."""
    largest = math.isinf(norm_type)
    totals = [_sum_of_powers(group, norm_type) for group in groups]
    if not totals:
        return torch.tensor(0.0)
    stacked = torch.stack([total.to(totals[0].device) for total in totals])
    return stacked.max() if largest else stacked.sum() ** (1.0 / norm_type)


def _sum_of_powers(group: GradientGroup, norm_type: float) -> torch.Tensor:
    """The sum of the elements' absolute values to the power of `norm_type`, or the largest of them; 0-dim."""
    largest = math.isinf(norm_type)
    device = group.shards[0].device if group.shards else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float32, device=device)
    for shards in by_device([shard for shard in group.shards if shard.numel()]):
        norms = torch.stack(torch._foreach_norm(shards, norm_type)).float()
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


def by_device(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors of each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    yield from groups.values()
