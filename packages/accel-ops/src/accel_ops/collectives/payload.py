"""What a rank sends in a gather, and how the payloads of all ranks become concatenated leaves.

A payload has a header - a digest of structure, dtypes and trailing shapes, the number of leaves, whether the packed leaves
follow, the sizes of the leaves in dimension 0 - and the packed leaves. It is sent in a slot of fixed size if it fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from accel_ops.collectives.packing import (
    ALIGNMENT_BYTES,
    PackedLayout,
    Signature,
    digest_of,
    grouped_bytes,
    layout_of,
    split_into,
)

SLOT_BYTES = 8192
WORD_BYTES = 8
HEADER_WORDS = 3  # digest, number of leaves, whether the slot is without data; the sizes in dimension 0 follow
AGREED_WORDS = 2  # of the header: equal on all ranks, or they called different collectives
Sizes = tuple[tuple[int, ...], ...]  # the size of each leaf in dimension 0, per rank


@dataclass(frozen=True, slots=True, eq=False)  # known by identity: `payload_of` makes one for each signature
class GatherPayload:
    """What a rank sends: a header, then its packed leaves. The same object serves all leaves of one signature."""

    # Of each leaf: its dtype, and its shape without dimension 0.
    trailing_shapes: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    dim0_sizes: tuple[int, ...]
    data_start: int
    header: torch.Tensor  # uint8 of shape (data_start,), on the CPU
    layout: PackedLayout
    is_elsewhere: bool  # whether the leaves are on another device than the slots, which hold the header only then

    def layout_for(self, dim0_sizes: tuple[int, ...]) -> PackedLayout:
        """The layout of a rank's data, from its sizes in dimension 0."""
        if dim0_sizes == self.dim0_sizes:
            return self.layout
        return layout_of(_with_dim0_sizes(self.trailing_shapes, dim0_sizes))

    @property
    def num_leaves(self) -> int:
        """The number of tensors."""
        return len(self.trailing_shapes)

    @property
    def lists_sizes(self) -> bool:
        """Whether the header fits into a slot."""
        return self.data_start <= SLOT_BYTES

    @property
    def fits(self) -> bool:
        """Whether header and leaves of this rank fit into a slot."""
        return not self.is_elsewhere and self.data_start + self.layout.num_bytes <= SLOT_BYTES

    def all_fit(self, sizes: Sizes) -> bool:
        """Whether every rank's payload fits into its slot, if its leaves are on the same device."""
        return _longest(self, sizes) <= SLOT_BYTES

    def slot(self, leaves: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Header, and the packed leaves if they are on that device and fit; uint8 of shape (SLOT_BYTES,), on the device."""
        header = self.header if self.lists_sizes else self.header[: HEADER_WORDS * WORD_BYTES]
        pieces = [header if device.type == "cpu" else header.to(device)]
        if self.fits:
            pieces += grouped_bytes(leaves, self.layout)
        used = sum([piece.numel() for piece in pieces])
        return torch.cat([*pieces, _padding(SLOT_BYTES - used, device)])


@lru_cache(maxsize=256)
def _padding(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


@lru_cache(maxsize=256)
def payload_of(structure: tuple[Any, ...], signature: Signature, is_elsewhere: bool = False) -> GatherPayload:
    """What a rank sends for leaves with these dtypes and shapes, on the device of the slots or elsewhere."""
    shapes = [(dtype, tuple(shape) or (1,)) for dtype, shape in signature]
    trailing_shapes = tuple((dtype, shape[1:]) for dtype, shape in shapes)
    dim0_sizes = tuple(shape[0] for _, shape in shapes)
    data_start = aligned((HEADER_WORDS + len(trailing_shapes)) * WORD_BYTES)
    words = [digest_of((structure, trailing_shapes)), len(trailing_shapes), int(is_elsewhere), *dim0_sizes]
    words += [0] * (data_start // WORD_BYTES - len(words))
    header = torch.tensor(words, dtype=torch.int64, device="cpu").view(torch.uint8)
    layout = layout_of(_with_dim0_sizes(trailing_shapes, dim0_sizes))
    return GatherPayload(trailing_shapes, dim0_sizes, data_start, header, layout, is_elsewhere)


def _with_dim0_sizes(
    trailing_shapes: Sequence[tuple[torch.dtype, tuple[int, ...]]], dim0_sizes: Sequence[int]
) -> Signature:
    return tuple((dtype, (size, *sizes)) for (dtype, sizes), size in zip(trailing_shapes, dim0_sizes, strict=True))


def aligned(num_bytes: int) -> int:
    """The next multiple of the alignment of all dtypes."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@lru_cache(maxsize=256)
def _longest(payload: GatherPayload, sizes: Sizes) -> int:
    return payload.data_start + max(payload.layout_for(row).num_bytes for row in sizes)


def join_small(slots: torch.Tensor, payload: GatherPayload, sizes: Sizes) -> list[torch.Tensor]:
    """The leaves of all ranks concatenated, from slots that hold full payloads.

    One `index_select` for each dtype, split into leaves afterwards, is several times faster than a copy for each leaf.

    Args:
        slots: uint8 of shape (world size, SLOT_BYTES).
        payload: What the ranks sent.
        sizes: The size of each leaf in dimension 0, per rank.
    """
    flat = slots.view(-1)
    leaves: list[torch.Tensor] = [flat] * payload.num_leaves
    for join in _joins(payload, sizes, slots.device):
        elements = flat.view(join.dtype).index_select(0, join.order)
        for index, leaf in zip(join.leaves, split_into(elements, join.counts, join.shapes), strict=True):
            leaves[index] = leaf
    return leaves


class _Join(NamedTuple):
    """How the leaves of one dtype are gathered from the slots of all ranks."""

    dtype: torch.dtype
    leaves: tuple[int, ...]  # positions in the list of leaves
    order: torch.Tensor  # which elements of all slots, seen in this dtype
    counts: tuple[int, ...]  # elements of each concatenated leaf
    shapes: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=256)
def _joins(payload: GatherPayload, sizes: Sizes, device: torch.device) -> tuple[_Join, ...]:
    layouts = [payload.layout_for(row) for row in sizes]
    joins = []
    for position, group in enumerate(payload.layout.groups):
        ranges: list[list[torch.Tensor]] = [[] for _ in group.leaves]
        for rank, layout in enumerate(layouts):
            there = layout.groups[position]
            start = (rank * SLOT_BYTES + payload.data_start + there.start) // group.dtype.itemsize
            for of_leaf, count in zip(ranges, there.counts, strict=True):
                of_leaf.append(torch.arange(start, start + count, dtype=torch.int32, device=device))
                start += count
        counts = tuple(sum(map(len, of_leaf)) for of_leaf in ranges)
        shapes = tuple((sum(row[leaf] for row in sizes), *payload.trailing_shapes[leaf][1]) for leaf in group.leaves)
        order = torch.cat([indices for of_leaf in ranges for indices in of_leaf])
        joins.append(_Join(group.dtype, group.leaves, order, counts, shapes))
    return tuple(joins)
