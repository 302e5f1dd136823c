"""The gather protocol: any nested structure from all processes in at most two collectives.

Every process sends one slot of fixed size first. It begins with a header - a digest of structure, dtypes and all sizes
but the first, the number of leaves, the first sizes - and holds the data too when they fit. From the headers every
process knows the same: whether structures fit together (if not, all raise), and whether the data were too large
somewhere, in which case one more collective brings them.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist

from accel_ops.messages import HEADER_WORDS, WORD_BYTES, Message, Sizes, aligned, join_small, message_of
from accel_ops.nested import flatten, rebuild
from accel_ops.packing import SMALL_BYTES, as_bytes, pack_into, signature_of, unpack
from accel_ops.transport import TorchTransport, Transport, transport_of
from accel_state.errors import DistributedOperationException
from accel_state.processes import PartialState


def gather_leaves(data: Any, operation: str, state: PartialState, group: Any = None) -> Any:
    """Join each leaf over all processes along its first dimension, which may differ between them.

    Args:
        data: Nested tensors; a 0-dim leaf counts as one of shape (1,).
        operation: On whose behalf, for errors.
        state: The process; there must be several.
        group: The processes that take part; all of them when None.

    Returns:
        The same structure, on the devices of the leaves given.

    Raises:
        TypeError: When a leaf is no tensor.
        DistributedOperationException: On all processes, when structures, dtypes or other sizes differ.
    """
    leaves, structure = flatten(data, operation)  # without leaves too: others may have some, and would wait
    transport = transport_of(state) if group is None else TorchTransport(group)
    world = state.num_processes if group is None else dist.get_world_size(group)
    wire = transport.wire_device(state)
    moved = [leaf if leaf.device == wire else leaf.to(wire) for leaf in leaves]
    message = message_of(structure, signature_of(moved))
    with torch.no_grad():
        joined = _exchange(moved, message, wire, transport, world)
    if joined is None:
        _report_mismatch(data, operation, world, group)
    if moved is not leaves:
        joined = [
            part if part.device == leaf.device else part.to(leaf.device)
            for part, leaf in zip(joined, leaves, strict=True)
        ]
    return rebuild(data, joined)


def _exchange(
    leaves: list[torch.Tensor], message: Message, wire: torch.device, transport: Transport, world: int
) -> list[torch.Tensor] | None:
    """The joined leaves; None when what the processes brought does not fit together."""
    slots = transport.all_gather(message.slot(leaves, wire), world)
    words = _words(slots, HEADER_WORDS + (message.num_leaves if message.lists_sizes else 1))
    if any(row[:HEADER_WORDS] != words[0][:HEADER_WORDS] for row in words):
        return None
    if not message.lists_sizes:  # too many leaves for a slot: their sizes are part of the data
        longest = aligned(max(row[HEADER_WORDS] for row in words))
        buffers = transport.all_gather(message.everything(leaves, longest), world)
        sizes = tuple([tuple(row[HEADER_WORDS:]) for row in _words(buffers, HEADER_WORDS + message.num_leaves)])
        return _join(buffers[:, message.data_start :], message, sizes)
    sizes = tuple([tuple(row[HEADER_WORDS:]) for row in words])
    if not message.all_fit(sizes):
        return _second_round(leaves, message, transport, sizes)
    if slots.numel() <= SMALL_BYTES:
        return join_small(slots, message, sizes)
    return _join(slots[:, message.data_start :], message, sizes)


def _words(rows: torch.Tensor, count: int) -> list[list[int]]:
    words: list[list[int]] = rows[:, : count * WORD_BYTES].view(torch.int64).tolist()
    return words


def _second_round(
    leaves: list[torch.Tensor], message: Message, transport: Transport, sizes: Sizes
) -> list[torch.Tensor]:
    """Send the data themselves."""
    if len(leaves) == 1 and all(row == sizes[0] for row in sizes):  # straight into the result, nothing is copied
        leaf = leaves[0].contiguous()
        joined = leaf.new_empty(len(sizes) * leaf.shape[0], *leaf.shape[1:])
        transport.all_gather(as_bytes(leaf), len(sizes), out=as_bytes(joined))
        return [joined]
    length = aligned(max(message.layout_for(row).num_bytes for row in sizes))
    buffer = torch.empty(length, dtype=torch.uint8, device=leaves[0].device)
    pack_into(buffer[: message.layout.num_bytes], leaves, message.layout)
    return _join(transport.all_gather(buffer, len(sizes)), message, sizes)


def _join(rows: torch.Tensor, message: Message, sizes: Sizes) -> list[torch.Tensor]:
    """The leaves from one row of packed data per process."""
    if all(row == sizes[0] for row in sizes):
        layout = message.layout_for(sizes[0])
        return unpack(rows[:, : layout.num_bytes], layout)
    per_process = []
    for row, first_sizes in zip(rows, sizes, strict=True):
        layout = message.layout_for(first_sizes)
        per_process.append(unpack(row[: layout.num_bytes], layout))
    return [torch.cat(parts) for parts in zip(*per_process, strict=True)]


def _report_mismatch(data: Any, operation: str, world: int, group: Any) -> NoReturn:
    """Raise the same error on all processes, with what each of them brought."""
    brought: list[Any] = [None] * world
    dist.all_gather_object(brought, describe(data), group=group)
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
