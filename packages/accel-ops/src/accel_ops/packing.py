"""Many tensors in one buffer of bytes, and back.

Leaves are grouped by dtype, widest first: every group then starts at a multiple of its item size, so that a slice of
the buffer can be viewed in its dtype without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import prod
from typing import Any

import torch

split_copy: Any = torch.split_with_sizes_copy  # torch does not say what it returns
Signature = tuple[tuple[torch.dtype, tuple[int, ...]], ...]  # dtype and shape of each leaf, some without first sizes


@dataclass(frozen=True, slots=True)
class Group:
    """The leaves of one dtype: where they lie in the buffer."""

    dtype: torch.dtype
    leaves: tuple[int, ...]  # positions in the list of leaves
    counts: tuple[int, ...]  # elements of each
    start: int  # in bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each leaf lies in a packed buffer."""

    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[Group, ...]
    num_bytes: int


def signature_of(leaves: Sequence[torch.Tensor]) -> Signature:
    """Dtype and shape of each leaf."""
    return tuple((leaf.dtype, tuple(leaf.shape)) for leaf in leaves)


@lru_cache(maxsize=256)
def layout_of(signature: Signature) -> Layout:
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
    return Layout(tuple(shape for _, shape in signature), tuple(groups), start)


@lru_cache(maxsize=256)
def digest_of(description: Any) -> int:
    """A number that is the same on all processes for equal descriptions (unlike `hash`), and else almost surely not."""
    return int.from_bytes(blake2b(repr(description).encode(), digest_size=8).digest(), "little", signed=True)


def pack(leaves: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """Copy leaves into one buffer; uint8 of shape (num_bytes,)."""
    parts = [_pack_group([leaves[index] for index in group.leaves]) for group in layout.groups if group.num_bytes]
    if not parts:
        device = leaves[0].device if leaves else torch.device("cpu")
        return torch.empty(0, dtype=torch.uint8, device=device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _pack_group(leaves: list[torch.Tensor]) -> torch.Tensor:
    flat = [leaf.detach().reshape(-1) for leaf in leaves]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).resolve_conj().resolve_neg().view(torch.uint8)


def unpack(buffer: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Copy every leaf out of a buffer.

    Args:
        buffer: uint8 of shape (num_bytes,), or (rows, num_bytes) with one packed structure per row.
        layout: Of one row.

    Returns:
        The leaves; with rows, each joined over rows along its first dimension (a 0-dim leaf becomes 1-dim).
    """
    rows = buffer.shape[0] if buffer.ndim == 2 else None
    found: list[torch.Tensor] = [buffer] * len(layout.shapes)
    for group in layout.groups:
        part = buffer[..., group.start : group.start + group.num_bytes]
        if group.num_bytes:
            pieces: Sequence[torch.Tensor] = split_copy(part.view(group.dtype), group.counts, dim=-1)
        else:
            pieces = [part.new_empty((*part.shape[:-1], 0), dtype=group.dtype) for _ in group.leaves]
        for index, piece in zip(group.leaves, pieces, strict=True):
            shape = layout.shapes[index]
            if rows is not None:
                shape = (rows * shape[0], *shape[1:]) if shape else (rows,)
            found[index] = piece.view(shape)
    return found
