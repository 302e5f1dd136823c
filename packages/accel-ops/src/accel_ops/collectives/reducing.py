"""Reducing leaves over all ranks: within the announcement when they are small, else by an all-reduce of each dtype of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from accel_ops.collectives.announcing import Operation, announce
from accel_ops.collectives.packing import (
    PackedLayout,
    buckets_of,
    flatten_together,
    layout_of,
    pack,
    signature_of,
    split_into,
    unpack,
)
from accel_ops.collectives.payload import payload_of
from accel_ops.collectives.transport import Reduction, Transport

FOLDS: dict[Reduction, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda parts: parts.sum(0, dtype=parts.dtype),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
}
MAX_REDUCED_DTYPES = 2  # each dtype needs its own all-reduce; more of them are all-gathered once and reduced locally


def reduce_leaves(
    leaves: list[torch.Tensor],
    how: Reduction,
    agreed: Hashable,
    operation: Operation,
    transport: Transport,
    world: int,
    factor: float = 1.0,
) -> list[torch.Tensor]:
    """The leaves, reduced over ranks.

    Args:
        leaves: The tensors of this rank, on the transport's device.
        how: The reduction.
        agreed: What must be equal on all ranks, besides shapes and dtypes.
        operation: For the error when ranks call something else.
        transport: Runs the collectives.
        world: The number of ranks.
        factor: Multiplies the results.

    Returns:
        Tensors of the shapes of `leaves`.

    Raises:
        DistributedOperationException: On all ranks, when shapes, dtypes or operations differ and the transport's
            device is the CPU. On another, reading the announcements of others would synchronize with it.
    """
    signature = signature_of(leaves)
    layout = layout_of(signature)
    if not leaves or leaves[0].device.type == "cpu":
        flat_signature = tuple((group.dtype, (sum(group.counts),)) for group in layout.groups)
        message = payload_of((operation.name, agreed, signature), flat_signature)
        fits = message.fits
        flats = _flats(leaves, layout) if fits else []
        announced = announce(flats, message, operation, transport, world, torch.device("cpu"))
        if fits:
            return _split(_fold(announced.data(message), message.layout, how), layout, factor)
    results = list(leaves)
    for bucket in buckets_of(signature):
        members = [leaves[index] for index in bucket]
        part = layout_of(signature_of(members))
        reduced = _split(_all_reduced(_flats(members, part), how, transport, world), part, factor)
        for index, result in zip(bucket, reduced, strict=True):
            results[index] = result
    return results


class _OwnTerm(torch.autograd.Function):
    """What was reduced, with the gradient of this rank's term of the sum: that of the others is theirs to take."""

    @staticmethod
    def forward(ctx: Any, term: torch.Tensor, reduced: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return reduced.clone()  # results of one dtype are parts of one tensor, and only some may need gradients

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0] * ctx.factor, None, None


def with_own_gradients(
    leaves: list[torch.Tensor], results: list[torch.Tensor], how: Reduction, factor: float
) -> list[torch.Tensor]:
    """Let gradients of the results flow to this rank's leaves.

    Args:
        leaves: What was reduced.
        results: What `reduce_leaves` returned for them.
        how: The reduction.
        factor: The factor of the results: the derivative.

    Returns:
        `results`, those whose leaves need gradients as parts of the graph, when the reduction is a sum.
    """
    if how != "sum" or not torch.is_grad_enabled():
        return results
    return [
        _OwnTerm.apply(leaf, result, factor) if leaf.requires_grad else result
        for leaf, result in zip(leaves, results, strict=True)
    ]


def _flats(leaves: list[torch.Tensor], layout: PackedLayout) -> list[torch.Tensor]:
    """A flat copy of the leaves of each dtype, because collectives work in place."""
    return [_flat([leaves[index] for index in group.leaves]) for group in layout.groups]


def _split(flats: list[torch.Tensor], layout: PackedLayout, factor: float) -> list[torch.Tensor]:
    """The leaves, times a factor, from what was reduced of each dtype."""
    results: list[torch.Tensor] = [torch.empty(0)] * len(layout.shapes)
    for group, flat in zip(layout.groups, flats, strict=True):
        if factor == 1.0:
            total = flat
        elif flat.is_floating_point() or flat.is_complex():
            total = flat.mul_(factor)
        else:
            total = flat * factor  # the mean of integers is a float
        shapes = [layout.shapes[index] for index in group.leaves]
        for index, piece in zip(group.leaves, split_into(total, group.counts, shapes), strict=True):
            results[index] = piece
    return results


def _flat(leaves: list[torch.Tensor]) -> torch.Tensor:
    return leaves[0].reshape(-1).clone() if len(leaves) == 1 else flatten_together(leaves)


def _fold(rows: torch.Tensor, layout: PackedLayout, how: Reduction) -> list[torch.Tensor]:
    """Reduce packed flats locally; `rows` is uint8 of shape (world, at least the layout's bytes)."""
    reduced = []
    for group in layout.groups:
        values = rows[:, group.start : group.start + group.num_bytes]
        empty = values.new_empty(0, dtype=group.dtype)  # an empty view cannot change its dtype
        reduced.append(FOLDS[how](values.view(group.dtype)) if group.num_bytes else empty)
    return reduced


def _all_reduced(flats: list[torch.Tensor], how: Reduction, transport: Transport, world: int) -> list[torch.Tensor]:
    """Reduce flat tensors of different dtypes."""
    if len(flats) <= MAX_REDUCED_DTYPES:
        return [transport.all_reduce(flat, how) for flat in flats]
    layout = layout_of(signature_of(flats))
    per_rank = [unpack(row, layout) for row in transport.all_gather(pack(flats, layout), world)]
    return [FOLDS[how](torch.stack(parts)) for parts in zip(*per_rank, strict=True)]
