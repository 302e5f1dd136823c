"""What each rank says it is about to do, before data move: ranks that do different things all raise instead of hanging.

Every rank sends one slot of fixed size first, whatever the operation. It begins with a header - a digest of operation,
structure, dtypes and sizes, the number of leaves, their first sizes - and holds the data too when they fit. So two
ranks that call different collectives, or one collective with what does not fit together, still complete this one
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
SAME_BUT_FIRST = "the same structure, dtypes and sizes (but for the first dimension) on every rank"


@dataclass(frozen=True, slots=True)
class Operation:
    """What a rank calls, for the error on all ranks when another calls something else.

    Args:
        name: Of the collective, as users know it.
        data: The data of this rank.
        needs: What has to fit together, and is not said otherwise.
        group: The ranks that take part; all of them when None.
    """

    name: str
    data: Any
    needs: str = SAME_BUT_FIRST
    group: Any = None

    def raise_mismatch(self, world: int) -> NoReturn:
        """Raise the same error on all ranks, with what each of them called."""
        calls: list[Any] = [None] * world
        dist.all_gather_object(calls, (self.name, describe(self.data)), group=self.group)
        listed = "\n".join(f"  - process {rank}: {name}({text})" for rank, (name, text) in enumerate(calls))
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
    """What all ranks said.

    Args:
        slots: uint8 of shape (world, SLOT_BYTES): the header, and the data of ranks whose data fit.
        sizes: The first size of each leaf, per rank; None when there are too many leaves to list them in a slot.
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
    """Exchange slots.

    Args:
        leaves: The data of this rank, on `device`.
        payload: Made of them and of the operation.
        operation: For the error.
        transport: Moves the slots.
        world: How many ranks take part.
        device: Where the transport's buffers lie.

    Raises:
        DistributedOperationException: On all ranks, when they do not announce the same.
    """
    slots = transport.all_gather(payload.slot(leaves, device), world)
    words = words_of(slots, HEADER_WORDS + (payload.num_leaves if payload.lists_sizes else 1))
    if any(row[:HEADER_WORDS] != words[0][:HEADER_WORDS] for row in words):
        operation.raise_mismatch(world)
    if not payload.lists_sizes:
        return Announced(slots, None, aligned(max(row[HEADER_WORDS] for row in words)))
    return Announced(slots, tuple([tuple(row[HEADER_WORDS:]) for row in words]))


def words_of(rows: torch.Tensor, count: int) -> list[list[int]]:
    """The first `count` words of each row as ints."""
    words: list[list[int]] = rows[:, : count * WORD_BYTES].view(torch.int64).tolist()
    return words


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
