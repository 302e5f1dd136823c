"""The announcement of a collective before its data: ranks that call different collectives all raise instead of hanging.

Every rank sends one slot of fixed size first, whatever the operation. It begins with a header - a digest of operation,
structure, dtypes and shapes, the number of leaves, their sizes in dimension 0 - and holds the data too when they fit. So two
ranks that call different collectives, or one collective with shapes that do not match, still complete this one
all-gather, and both see that the digests differ.

Slots are in CPU memory, also when the data are on an accelerator: a host that reads what is there waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from accel_ops.collectives.payload import AGREED_WORDS, HEADER_WORDS, WORD_BYTES, GatherPayload, Sizes
from accel_ops.collectives.transport import Transport
from accel_state.errors import DistributedOperationException

SAME_SHAPES = "the same structure, dtypes and shapes on every rank"
SAME_DIMENSIONS = "the same number of tensors, with the same number of dimensions, on every rank"
SAME_BUT_FIRST = "the same structure, dtypes and shapes (except for dimension 0) on every rank"
SAME_LENGTH = "lists of the same length and one from_process"
ADVICE = {
    SAME_SHAPES: "Pad what differs with accelerator.pad_across_processes, or gather it as objects.",
    SAME_BUT_FIRST: "Pad what differs with accelerator.pad_across_processes, or gather it as objects.",
    SAME_DIMENSIONS: "Give them the same number of dimensions everywhere, for example with unsqueeze.",
    SAME_LENGTH: "Pass lists of the same length, and the same rank as from_process, everywhere.",
}
"""What to do when ranks do not agree on what an operation needs."""


class Operation(NamedTuple):
    """The collective that a rank calls, for the error on all ranks when another rank calls something else.

    Args:
        name: The public name of the collective.
        data: The data of this rank.
        needs: What has to be equal on all ranks, for the error.
    """

    name: str
    data: Any
    needs: str = SAME_BUT_FIRST

    def raise_mismatch(self, world: int, group: Any) -> NoReturn:
        """Raise the same error on all ranks of a process group, listing what each of them called."""
        calls: list[Any] = [None] * world
        dist.all_gather_object(calls, (self.name, describe(self.data)), group=group)
        listed = "\n".join(f"  - rank {rank}: {name}({text})" for rank, (name, text) in enumerate(calls))
        if len({name for name, _ in calls}) > 1:
            raise DistributedOperationException(
                f"{self.name}: the ranks called different collectives:\n{listed}\n"
                "Call the same collectives in the same order on every rank; look for a branch that only some ranks take."
            )
        raise DistributedOperationException(
            f"{self.name} needs {self.needs}, but got:\n{listed}\n{ADVICE[self.needs]}"
        )


class Announced(NamedTuple):
    """The announcements of all ranks.

    Args:
        slots: uint8 of shape (world, SLOT_BYTES): the header, and the data of ranks whose data fit.
        sizes: The size of each leaf in dimension 0, per rank.
        is_elsewhere: Whether the data of any rank are on another device than the slots.
        is_complete: Whether the slots hold the data of all ranks.
    """

    slots: torch.Tensor
    sizes: Sizes
    is_elsewhere: bool
    is_complete: bool

    def data(self, payload: GatherPayload) -> torch.Tensor:
        """The slots without their headers."""
        return self.slots[:, payload.data_start :]


def announce(
    leaves: Sequence[torch.Tensor],
    payload: GatherPayload,
    operation: Operation,
    transport: Transport,
    world: int,
    device: torch.device,
) -> Announced:
    """All-gather the slots of all ranks.

    Args:
        leaves: The data of this rank, on `device`; not looked at when the payload says that they are elsewhere.
        payload: What this rank sends, made from the leaves and the operation.
        operation: For the error.
        transport: Runs the all-gather.
        world: The number of ranks.
        device: The device of the transport's buffers.

    Raises:
        DistributedOperationException: On all ranks, when their announcements differ.
    """
    slots = transport.all_gather(payload.slot(leaves, device), world)
    words = words_of(slots, HEADER_WORDS + (payload.num_leaves if payload.lists_sizes else 0))
    if any(row[:AGREED_WORDS] != words[0][:AGREED_WORDS] for row in words):
        operation.raise_mismatch(world, transport.group)
    if not payload.lists_sizes:  # too many leaves for a slot: their sizes come in headers of full length
        words = words_of(transport.all_gather(payload.header.to(device), world), HEADER_WORDS + payload.num_leaves)
    sizes = tuple([tuple(row[HEADER_WORDS:]) for row in words])
    is_elsewhere = any([row[AGREED_WORDS] for row in words])
    return Announced(slots, sizes, is_elsewhere, not is_elsewhere and payload.all_fit(sizes))


def words_of(rows: torch.Tensor, count: int) -> list[list[int]]:
    """The first `count` int64 words of each row, as int."""
    words: list[list[int]] = rows[:, : count * WORD_BYTES].view(torch.int64).tolist()
    return words


def describe(data: Any) -> str:
    """A nested structure as a str, with dtypes and shapes in place of tensors."""
    if isinstance(data, torch.Tensor):
        return f"{str(data.dtype).removeprefix('torch.')}{list(data.shape)}"
    if isinstance(data, dict):
        return "{" + ", ".join(f"{key!r}: {describe(item)}" for key, item in data.items()) + "}"
    if isinstance(data, (list, tuple)):
        inner = ", ".join(map(describe, data))
        return f"({inner})" if isinstance(data, tuple) else f"[{inner}]"
    return type(data).__name__
