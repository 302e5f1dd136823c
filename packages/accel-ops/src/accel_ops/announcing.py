"""The announcement of a collective before its data: ranks that call different collectives all raise instead of hanging.

Every rank sends one slot of fixed size first, whatever the operation. It begins with a header - a digest of operation,
structure, dtypes and shapes, the number of leaves, their sizes in dimension 0 - and holds the data too when they fit. So two
ranks that call different collectives, or one collective with shapes that do not match, still complete this one
all-gather, and both see that the digests differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from accel_ops.gather_payload import HEADER_WORDS, WORD_BYTES, GatherPayload, Sizes, aligned
from accel_ops.transport import Transport
from accel_state.errors import DistributedOperationException

SAME_SHAPES = "the same structure, dtypes and shapes on every rank"
SAME_BUT_FIRST = "the same structure, dtypes and shapes (except for dimension 0) on every rank"


@dataclass(frozen=True, slots=True)
class Operation:
    """The collective that a rank calls, for the error on all ranks when another rank calls something else.

    Args:
        name: The public name of the collective.
        data: The data of this rank.
        needs: What has to be equal on all ranks, for the error.
        group: The process group; the default one when None.
    """

    name: str
    data: Any
    needs: str = SAME_BUT_FIRST
    group: Any = None

    def raise_mismatch(self, world: int) -> NoReturn:
        """Raise the same error on all ranks, listing what each of them called."""
        calls: list[Any] = [None] * world
        dist.all_gather_object(calls, (self.name, describe(self.data)), group=self.group)
        listed = "\n".join(f"  - rank {rank}: {name}({text})" for rank, (name, text) in enumerate(calls))
        if len({name for name, _ in calls}) > 1:
            raise DistributedOperationException(
                f"{self.name}: the ranks called different collectives:\n{listed}\n"
                "Call the same collectives in the same order on every rank; look for a branch that only some ranks take."
            )
        raise DistributedOperationException(
            f"{self.name} needs {self.needs}, but got:\n{listed}\n"
            "Pad what differs with accelerator.pad_across_processes, or gather it as objects."
        )


@dataclass(frozen=True, slots=True)
class Announced:
    """The announcements of all ranks.

    Args:
        slots: uint8 of shape (world, SLOT_BYTES): the header, and the data of ranks whose data fit.
        sizes: The size of each leaf in dimension 0, per rank; None when there are too many leaves to list them in a slot.
        longest: The longest payload in bytes, header included, when sizes are not listed.
    """

    slots: torch.Tensor
    sizes: Sizes | None
    longest: int = 0

    def data(self, payload: GatherPayload) -> torch.Tensor:
        """The slots without their headers."""
        return self.slots[:, payload.data_start :]


def announce(
    leaves: list[torch.Tensor],
    payload: GatherPayload,
    operation: Operation,
    transport: Transport,
    world: int,
    device: torch.device,
) -> Announced:
    """All-gather the slots of all ranks.

    Args:
        leaves: The data of this rank, on `device`.
        payload: What this rank sends, made from the leaves and the operation.
        operation: For the error.
        transport: Runs the all-gather.
        world: The number of ranks.
        device: The device of the transport's buffers.

    Raises:
        DistributedOperationException: On all ranks, when their announcements differ.
    """
    slots = transport.all_gather(payload.slot(leaves, device), world)
    words = words_of(slots, HEADER_WORDS + (payload.num_leaves if payload.lists_sizes else 1))
    if any(row[:HEADER_WORDS] != words[0][:HEADER_WORDS] for row in words):
        operation.raise_mismatch(world)
    if not payload.lists_sizes:
        return Announced(slots, None, aligned(max(row[HEADER_WORDS] for row in words)))
    return Announced(slots, tuple([tuple(row[HEADER_WORDS:]) for row in words]))


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
