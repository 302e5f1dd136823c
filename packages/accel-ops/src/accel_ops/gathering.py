"""The gather protocol: any nested structure from all processes in at most two collectives.

Every process sends one slot of fixed size first. It begins with a header - a digest of structure, dtypes and all sizes
but the first, the number of leaves, the first sizes - and holds the data too when they fit. From the headers every
process knows the same: whether structures fit together (if not, all raise), and whether the data were too large
somewhere, in which case one more collective brings them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from accel_ops.nested import flatten, rebuild
from accel_ops.packing import Layout, Signature, digest_of, layout_of, pack, unpack
from accel_ops.transport import Transport, transport_of
from accel_state.errors import DistributedOperationException
from accel_state.processes import PartialState

SLOT_BYTES = 8192
WORD_BYTES = 8
ALIGNMENT_BYTES = 16  # of the data within a slot: the widest dtype is complex128
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
    leaves, structure = flatten(data, operation)
    if not leaves:
        return data
    transport = transport_of(state)
    wire = transport.wire_device(state)
    devices = [leaf.device for leaf in leaves]
    message = Message([leaf.detach().to(wire) for leaf in leaves], structure)

    slots = transport.all_gather(message.slot(), state.num_processes)
    headers = _read_headers(slots, message)
    if headers is None:
        _report_mismatch(data, operation, state)
    sizes = headers.first_sizes
    if sizes is None:  # too many leaves for a slot: their sizes are part of the data
        buffers = transport.all_gather(message.everything(_longest(headers, transport, message, state)), len(slots))
        sizes = _first_sizes(buffers, message)
        joined = _join(buffers[:, message.data_start :], message, sizes)
    elif all(message.fits(row) for row in sizes):
        joined = _join(slots[:, message.data_start :], message, sizes)
    else:
        joined = _second_round(transport, message, sizes)
    return rebuild(data, (leaf.to(device) for leaf, device in zip(joined, devices, strict=True)))


class Message:
    """What one process sends: a header, and packed leaves."""

    def __init__(self, leaves: list[torch.Tensor], structure: tuple[Any, ...]) -> None:
        self.leaves = [leaf if leaf.ndim else leaf.reshape(1) for leaf in leaves]
        self.first_sizes = [leaf.shape[0] for leaf in self.leaves]
        self.rest = tuple((leaf.dtype, tuple(leaf.shape[1:])) for leaf in self.leaves)
        self.digest = digest_of((structure, self.rest))
        num_bytes = (HEADER_WORDS + len(leaves)) * WORD_BYTES
        self.data_start = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.layout = self.layout_for(self.first_sizes)

    def layout_for(self, first_sizes: Sequence[int]) -> Layout:
        """The layout of a process's data, from its first sizes."""
        return layout_of(self._signature(tuple(first_sizes)))

    def _signature(self, first_sizes: tuple[int, ...]) -> Signature:
        return tuple((dtype, (size, *rest)) for (dtype, rest), size in zip(self.rest, first_sizes, strict=True))

    @property
    def lists_sizes(self) -> bool:
        """Whether the header fits into a slot."""
        return self.data_start <= SLOT_BYTES

    def fits(self, first_sizes: Sequence[int]) -> bool:
        """Whether a process's data fit into its slot."""
        return self.data_start + self.layout_for(first_sizes).num_bytes <= SLOT_BYTES

    def header(self) -> torch.Tensor:
        """uint8 of shape (data_start,)."""
        words = [self.digest, len(self.leaves), *self.first_sizes]
        words += [0] * (self.data_start // WORD_BYTES - len(words))
        return torch.tensor(words, dtype=torch.int64, device=self.leaves[0].device).view(torch.uint8)

    def slot(self) -> torch.Tensor:
        """uint8 of shape (SLOT_BYTES,)."""
        slot = torch.empty(SLOT_BYTES, dtype=torch.uint8, device=self.leaves[0].device)
        if not self.lists_sizes:  # the length of the message stands in for the sizes
            words = [self.digest, len(self.leaves), self.data_start + self.layout.num_bytes]
            slot[: 3 * WORD_BYTES] = torch.tensor(words, dtype=torch.int64, device=slot.device).view(torch.uint8)
            return slot
        slot[: self.data_start] = self.header()
        if self.fits(self.first_sizes):
            slot[self.data_start : self.data_start + self.layout.num_bytes] = pack(self.leaves, self.layout)
        return slot

    def everything(self, length: int) -> torch.Tensor:
        """Header and data, filled up to `length` bytes."""
        return _filled_up(torch.cat([self.header(), pack(self.leaves, self.layout)]), length)


@dataclass(frozen=True, slots=True)
class Headers:
    """What the slots of all processes say."""

    first_sizes: list[list[int]] | None  # per process and leaf; None when the slots had no room for them
    lengths: list[int]  # of the whole message, meaningful without first sizes


def _read_headers(slots: torch.Tensor, message: Message) -> Headers | None:
    """The headers; None when they do not fit together."""
    num_words = HEADER_WORDS + (len(message.leaves) if message.lists_sizes else 1)
    words = slots[:, : num_words * WORD_BYTES].contiguous().view(torch.int64).tolist()
    if any(row[:HEADER_WORDS] != words[0][:HEADER_WORDS] for row in words):
        return None
    rest = [row[HEADER_WORDS:] for row in words]
    return Headers(rest if message.lists_sizes else None, [row[0] for row in rest])


def _longest(headers: Headers, transport: Transport, message: Message, state: PartialState) -> int:
    longest = max(headers.lengths)
    return -(-longest // ALIGNMENT_BYTES) * ALIGNMENT_BYTES  # rows of the gathered buffer stay aligned


def _first_sizes(buffers: torch.Tensor, message: Message) -> list[list[int]]:
    num_words = HEADER_WORDS + len(message.leaves)
    words = buffers[:, : num_words * WORD_BYTES].contiguous().view(torch.int64).tolist()
    return [row[HEADER_WORDS:] for row in words]


def _second_round(transport: Transport, message: Message, sizes: list[list[int]]) -> list[torch.Tensor]:
    """Send the data themselves."""
    equal = all(row == sizes[0] for row in sizes)
    if equal and len(message.leaves) == 1:  # straight into the result, nothing is copied
        leaf = message.leaves[0].contiguous()
        gathered = transport.all_gather(_wire_view(leaf), len(sizes))
        return [gathered.view(leaf.dtype).view(len(sizes) * leaf.shape[0], *leaf.shape[1:])]
    longest = max(message.layout_for(row).num_bytes for row in sizes)
    length = -(-longest // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return _join(
        transport.all_gather(_filled_up(pack(message.leaves, message.layout), length), len(sizes)), message, sizes
    )


def _wire_view(leaf: torch.Tensor) -> torch.Tensor:
    """A contiguous leaf as its bytes."""
    return leaf.resolve_conj().resolve_neg().view(-1).view(torch.uint8)


def _join(rows: torch.Tensor, message: Message, sizes: list[list[int]]) -> list[torch.Tensor]:
    """The leaves from one row of packed data per process."""
    if all(row == sizes[0] for row in sizes):
        layout = message.layout_for(sizes[0])
        return unpack(rows[:, : layout.num_bytes], layout)
    per_process = []
    for row, first_sizes in zip(rows, sizes, strict=True):
        layout = message.layout_for(first_sizes)
        per_process.append(unpack(row[: layout.num_bytes], layout))
    return [torch.cat(parts) for parts in zip(*per_process, strict=True)]


def _filled_up(buffer: torch.Tensor, length: int) -> torch.Tensor:
    if buffer.numel() == length:
        return buffer
    return torch.cat([buffer, buffer.new_empty(length - buffer.numel())])


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
