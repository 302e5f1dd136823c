"""Packing many tensors into one buffer of bytes, and unpacking them.

Leaves are grouped by dtype, widest first: every group then starts at a multiple of its item size, so that a slice of
the buffer can be viewed in its dtype without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import prod
from typing import Any, NamedTuple

import torch

split_copy: Any = torch.split_with_sizes_copy  # torch does not say what it returns
flatten_together: Any = torch._utils._flatten_dense_tensors
SMALL_BYTES = 65536
LARGE_BYTES = 1 << 20  # a leaf that is not packed with others
BUCKET_BYTES = 64 << 20  # the most that is packed together
ALIGNMENT_BYTES = 16  # of the widest dtype, complex128
Signature = tuple[tuple[torch.dtype, tuple[int, ...]], ...]  # dtype and shape of each leaf, some without first sizes


class Group(NamedTuple):
    """The leaves of one dtype, and their place in the buffer."""

    dtype: torch.dtype
    leaves: tuple[int, ...]  # positions in the list of leaves
    counts: tuple[int, ...]  # elements of each
    start: int  # in bytes
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)  # known by identity: `layout_of` makes one for each signature
class PackedLayout:
    """The place of each leaf in a packed buffer."""

    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[Group, ...]
    num_bytes: int


def signature_of(leaves: Sequence[torch.Tensor]) -> Signature:
    """Dtype and shape of each leaf."""
    return tuple([(leaf.dtype, leaf.shape) for leaf in leaves])


@lru_cache(maxsize=256)
def layout_of(signature: Signature) -> PackedLayout:
    """The layout of leaves with these dtypes and shapes; the same on every process."""
    dtypes = sorted({dtype for dtype, _ in signature}, key=lambda dtype: (-dtype.itemsize, str(dtype)))
    groups = []
    start = 0
    for dtype in dtypes:
        members = tuple(index for index, (other, _) in enumerate(signature) if other == dtype)
        counts = tuple(prod(signature[index][1]) for index in members)
        num_bytes = sum(counts) * dtype.itemsize
        groups.append(Group(dtype, members, counts, start, num_bytes))
        start += num_bytes
    num_bytes = -(-start // ALIGNMENT_BYTES) * ALIGNMENT_BYTES  # so that rows of packed structures stay aligned
    return PackedLayout(tuple(shape for _, shape in signature), tuple(groups), num_bytes)


@lru_cache(maxsize=256)
def buckets_of(signature: Signature) -> tuple[tuple[int, ...], ...]:
    """Divide leaves into buckets, each for one collective: large leaves alone, so that nothing is copied, others together.

    Args:
        signature: Dtype and shape of each leaf, the same on all ranks.

    Returns:
        The positions of the leaves of each bucket; at most `BUCKET_BYTES` are packed together.
    """
    buckets: list[tuple[int, ...]] = []
    packed: list[int] = []
    filled = 0
    for index, (dtype, shape) in enumerate(signature):
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes >= LARGE_BYTES:
            buckets.append((index,))
            continue
        if packed and filled + num_bytes > BUCKET_BYTES:
            buckets.append(tuple(packed))
            packed, filled = [], 0
        packed.append(index)
        filled += num_bytes
    return (*buckets, tuple(packed)) if packed else tuple(buckets)


@lru_cache(maxsize=256)
def digest_of(description: Any) -> int:
    """An int that is equal on all processes for equal descriptions (unlike `hash`), and almost surely differs otherwise."""
    return int.from_bytes(blake2b(repr(description).encode(), digest_size=8).digest(), "little", signed=True)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the bytes of a contiguous tensor; uint8 of shape (bytes,)."""
    plain = tensor.resolve_conj().resolve_neg() if tensor.is_complex() else tensor
    flat = plain.view(-1)
    if flat.stride(0) != 1:  # a single element may have any stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def pack(leaves: Sequence[torch.Tensor], layout: PackedLayout) -> torch.Tensor:
    """Copy leaves, all on one device, into a new buffer; uint8 of shape (num_bytes,)."""
    buffer = leaves[0].new_empty(layout.num_bytes, dtype=torch.uint8)
    pack_into(buffer, leaves, layout)
    return buffer


def pack_into(buffer: torch.Tensor, leaves: Sequence[torch.Tensor], layout: PackedLayout) -> None:
    """Copy leaves, all on one device, into a buffer; uint8 of shape (num_bytes,)."""
    start = 0
    for part in grouped_bytes(leaves, layout):
        buffer[start : start + len(part)] = part
        start += len(part)


def grouped_bytes(leaves: Sequence[torch.Tensor], layout: PackedLayout) -> list[torch.Tensor]:
    """The bytes of each group, in the order of the layout; uint8 of shape (num_bytes of the group,)."""
    with torch.no_grad():
        return [
            as_bytes(flatten_together([leaves[index] for index in group.leaves]))
            for group in layout.groups
            if group.num_bytes
        ]


def unpack(buffer: torch.Tensor, layout: PackedLayout) -> list[torch.Tensor]:
    """Copy every leaf out of a buffer.

    Args:
        buffer: uint8 of shape (num_bytes,), or (rows, num_bytes) with one packed structure per row.
        layout: The layout of one row.

    Returns:
        The leaves; with rows, each concatenated over rows along dimension 0 (a 0-dim leaf becomes 1-dim).
    """
    rows = buffer.shape[0] if buffer.ndim == 2 else None
    leaves: list[torch.Tensor] = [buffer] * len(layout.shapes)
    for group in layout.groups:
        if not group.num_bytes:  # an empty buffer cannot be viewed in another dtype
            for index in group.leaves:
                leaves[index] = buffer.new_empty(_joined(layout.shapes[index], rows), dtype=group.dtype)
            continue
        part = buffer[..., group.start : group.start + group.num_bytes].view(group.dtype)
        with torch.enable_grad():  # see split_into
            for index, copy in zip(group.leaves, split_copy(part, group.counts, dim=-1), strict=True):
                leaves[index] = copy.view(_joined(layout.shapes[index], rows))
    return leaves


def _joined(shape: tuple[int, ...], rows: int | None) -> tuple[int, ...]:
    if rows is None:
        return shape
    return (rows * shape[0], *shape[1:]) if shape else (rows,)


def split_into(flat: torch.Tensor, counts: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Split a flat tensor into leaves that own no shared memory, so that users may change them in place.

    Autograd does not take them for views of one tensor: each may be written to, also values that need gradients, as
    when a process puts its own part of a gathered tensor back. Small ones share memory; large ones are copies, so that
    none keeps the memory of the others alive.

    Args:
        flat: Of shape (sum(counts),), without gradients.
        counts: Elements of each leaf.
        shapes: Shape of each leaf.
    """
    cut = torch.unsafe_split_with_sizes if flat.numel() * flat.element_size() <= SMALL_BYTES else split_copy
    pieces = cut(flat, counts) if len(counts) > 1 else [flat]
    with torch.enable_grad():  # a view made without gradients would refuse such values
        return [piece if len(shape) == 1 else piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
