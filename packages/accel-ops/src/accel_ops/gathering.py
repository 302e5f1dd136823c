"""The gather protocol: any nested structure from all processes in at most two collectives.

Every process sends one slot of fixed size first. It begins with a header - a digest of structure, dtypes and all sizes
but the first, the number of leaves, the first sizes - and holds the data too when they fit. From the headers every
process knows the same: whether structures fit together (if not, all raise), and whether the data were too large
somewhere, in which case one more collective brings them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from accel_ops.nested import flatten, rebuild
from accel_ops.packing import (
    ALIGNMENT_BYTES,
    SMALL_BYTES,
    Layout,
    Signature,
    digest_of,
    layout_of,
    pack_into,
    signature_of,
    unflatten,
    unpack,
)
from accel_ops.transport import Transport, transport_of
from accel_state.errors import DistributedOperationException
from accel_state.processes import PartialState

SLOT_BYTES = 8192
WORD_BYTES = 8
HEADER_WORDS = 2  # digest, number of leaves; the first sizes follow


def gather_leaves(data: Any, operation: str, state: PartialState) -> Any:
    """Join each leaf over all processes along its first dimension, which may differ between them.

    Args:
        data: Nested tensors; a 0-dim leaf counts as one of shape (1,).
        operation: On whose behalf, for errors.
        state: The process; there must be several.

    Returns:
        The same structure, on the devices of the leaves given.

    Raises:
        TypeError: When a leaf is no tensor.
        DistributedOperationException: On all processes, when structures, dtypes or other sizes differ.
    """
    leaves, structure = flatten(data, operation)  # without leaves too: others may have some, and would wait
    transport = transport_of(state)
    wire = transport.wire_device(state)
    moved = [leaf if leaf.device == wire else leaf.to(wire) for leaf in leaves]
    message = message_of(structure, signature_of(moved))
    with torch.no_grad():
        joined = _exchange(moved, message, wire, transport, state)
    if joined is None:
        _report_mismatch(data, operation, state)
    if moved is not leaves:
        joined = [
            part if part.device == leaf.device else part.to(leaf.device)
            for part, leaf in zip(joined, leaves, strict=True)
        ]
    return rebuild(data, joined)


@dataclass(frozen=True, slots=True)
class Message:
    """What a process sends: a header, then its packed leaves. The same object serves all leaves of one signature."""

    rest: tuple[tuple[torch.dtype, tuple[int, ...]], ...]  # of each leaf: dtype, and sizes but the first
    first_sizes: tuple[int, ...]
    data_start: int
    header: torch.Tensor  # uint8 of shape (data_start,), on the CPU
    layout: Layout

    def layout_for(self, first_sizes: Sequence[int]) -> Layout:
        """The layout of a process's data, from its first sizes."""
        if tuple(first_sizes) == self.first_sizes:
            return self.layout
        return layout_of(_with_first_sizes(self.rest, first_sizes))

    @property
    def num_leaves(self) -> int:
        """How many tensors there are."""
        return len(self.rest)

    @property
    def lists_sizes(self) -> bool:
        """Whether the header fits into a slot."""
        return self.data_start <= SLOT_BYTES

    def fits(self, first_sizes: Sequence[int]) -> bool:
        """Whether a process's data fit into its slot."""
        return self.data_start + self.layout_for(first_sizes).num_bytes <= SLOT_BYTES

    def slot(self, leaves: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """uint8 of shape (SLOT_BYTES,), on the device where the leaves are."""
        slot = torch.empty(SLOT_BYTES, dtype=torch.uint8, device=device)
        if not self.lists_sizes:  # the length of the message stands in for the sizes
            beginning = self.header[: (HEADER_WORDS + 1) * WORD_BYTES].clone()
            beginning.view(torch.int64)[HEADER_WORDS] = self.data_start + self.layout.num_bytes
            slot[: beginning.numel()] = beginning
            return slot
        slot[: self.data_start] = self.header
        if self.fits(self.first_sizes):
            pack_into(slot[self.data_start : self.data_start + self.layout.num_bytes], leaves, self.layout)
        return slot

    def everything(self, leaves: Sequence[torch.Tensor], length: int) -> torch.Tensor:
        """Header and data, filled up to `length` bytes."""
        buffer = torch.empty(length, dtype=torch.uint8, device=leaves[0].device)
        buffer[: self.data_start] = self.header
        pack_into(buffer[self.data_start : self.data_start + self.layout.num_bytes], leaves, self.layout)
        return buffer


@lru_cache(maxsize=256)
def message_of(structure: tuple[Any, ...], signature: Signature) -> Message:
    """What a process sends for leaves with these dtypes and shapes."""
    shapes = [(dtype, tuple(shape) or (1,)) for dtype, shape in signature]
    rest = tuple((dtype, shape[1:]) for dtype, shape in shapes)
    first_sizes = tuple(shape[0] for _, shape in shapes)
    data_start = _aligned((HEADER_WORDS + len(rest)) * WORD_BYTES)
    words = [digest_of((structure, rest)), len(rest), *first_sizes]
    words += [0] * (data_start // WORD_BYTES - len(words))
    header = torch.tensor(words, dtype=torch.int64).view(torch.uint8)
    return Message(rest, first_sizes, data_start, header, layout_of(_with_first_sizes(rest, first_sizes)))


def _with_first_sizes(rest: Sequence[tuple[torch.dtype, tuple[int, ...]]], first_sizes: Sequence[int]) -> Signature:
    return tuple((dtype, (size, *sizes)) for (dtype, sizes), size in zip(rest, first_sizes, strict=True))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _exchange(
    leaves: list[torch.Tensor], message: Message, wire: torch.device, transport: Transport, state: PartialState
) -> list[torch.Tensor] | None:
    """The joined leaves; None when what the processes brought does not fit together."""
    slots = transport.all_gather(message.slot(leaves, wire), state.num_processes)
    words = _words(slots, HEADER_WORDS + (message.num_leaves if message.lists_sizes else 1))
    if any(row[:HEADER_WORDS] != words[0][:HEADER_WORDS] for row in words):
        return None
    if not message.lists_sizes:  # too many leaves for a slot: their sizes are part of the data
        longest = _aligned(max(row[HEADER_WORDS] for row in words))
        buffers = transport.all_gather(message.everything(leaves, longest), state.num_processes)
        sizes = [row[HEADER_WORDS:] for row in _words(buffers, HEADER_WORDS + message.num_leaves)]
        return _join(buffers[:, message.data_start :], message, sizes)
    sizes = [row[HEADER_WORDS:] for row in words]
    if all(message.fits(row) for row in sizes):
        return _join(slots[:, message.data_start :], message, sizes)
    return _second_round(leaves, message, transport, sizes)


def _words(rows: torch.Tensor, count: int) -> list[list[int]]:
    words: list[list[int]] = rows[:, : count * WORD_BYTES].view(torch.int64).tolist()
    return words


def _second_round(
    leaves: list[torch.Tensor], message: Message, transport: Transport, sizes: list[list[int]]
) -> list[torch.Tensor]:
    """Send the data themselves."""
    if len(leaves) == 1 and all(row == sizes[0] for row in sizes):  # straight into the result, nothing is copied
        leaf = leaves[0].contiguous()
        gathered = transport.all_gather(leaf.resolve_conj().resolve_neg().view(-1).view(torch.uint8), len(sizes))
        return [gathered.view(leaf.dtype).view(len(sizes) * leaf.shape[0], *leaf.shape[1:])]
    length = _aligned(max(message.layout_for(row).num_bytes for row in sizes))
    buffer = torch.empty(length, dtype=torch.uint8, device=leaves[0].device)
    pack_into(buffer[: message.layout.num_bytes], leaves, message.layout)
    return _join(transport.all_gather(buffer, len(sizes)), message, sizes)


def _join(rows: torch.Tensor, message: Message, sizes: list[list[int]]) -> list[torch.Tensor]:
    """The leaves from one row of packed data per process."""
    if all(row == sizes[0] for row in sizes):
        layout = message.layout_for(sizes[0])
        return unpack(rows[:, : layout.num_bytes], layout)
    if rows.numel() <= SMALL_BYTES and all(dtype == message.rest[0][0] for dtype, _ in message.rest):
        typed = rows.view(message.rest[0][0])
        order, templates = _joining(message.rest, tuple(map(tuple, sizes)), typed.shape[1], rows.device)
        return list(unflatten(typed.reshape(-1).index_select(0, order), templates))
    per_process = []
    for row, first_sizes in zip(rows, sizes, strict=True):
        layout = message.layout_for(first_sizes)
        per_process.append(unpack(row[: layout.num_bytes], layout))
    return [torch.cat(parts) for parts in zip(*per_process, strict=True)]


@lru_cache(maxsize=256)
def _joining(
    rest: tuple[tuple[torch.dtype, tuple[int, ...]], ...],
    sizes: tuple[tuple[int, ...], ...],
    width: int,
    device: torch.device,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """For small ragged leaves of one dtype: the order of elements that joins each, and what the results look like.

    Args:
        rest: Dtype of each leaf, and its sizes but the first.
        sizes: First size of each leaf, per process.
        width: Elements of a process's row.
        device: Where the rows are.
    """
    parts: list[list[torch.Tensor]] = [[] for _ in rest]
    for rank, first_sizes in enumerate(sizes):
        start = rank * width
        for part, (_, shape), size in zip(parts, rest, first_sizes, strict=True):
            count = size * prod(shape)
            part.append(torch.arange(start, start + count, device=device))
            start += count
    templates = tuple(
        torch.empty((sum(column), *shape), device="meta")
        for (_, shape), column in zip(rest, zip(*sizes, strict=True), strict=True)
    )
    return torch.cat([index for part in parts for index in part]), templates


def _report_mismatch(data: Any, operation: str, state: PartialState) -> NoReturn:
    """Raise the same error on all processes, with what each of them brought."""
    brought: list[Any] = [None] * state.num_processes
    dist.all_gather_object(brought, describe(data))
    listed = "\n".join(f"  - process {rank}: {text}" for rank, text in enumerate(brought))
    raise DistributedOperationException(
        f"{operation} needs the same structure, dtypes and sizes (but for the first dimension) on every process, but "
        f"got:\n{listed}\nPad what differs with accelerator.pad_across_processes, or gather it as objects."
    )


def describe(data: Any) -> str:
    """A nested structure in words: shapes and dtypes in place of tensors."""
    if isinstance(data, torch.Tensor):
        return f"{str(data.dtype).removeprefix('torch.')}{list(data.shape)}"
    if isinstance(data, dict):
        return "{" + ", ".join(f"{key!r}: {describe(item)}" for key, item in data.items()) + "}"
    if isinstance(data, (list, tuple)):
        inner = ", ".join(map(describe, data))
        return f"({inner})" if isinstance(data, tuple) else f"[{inner}]"
    return type(data).__name__
