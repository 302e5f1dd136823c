"""All-gather any nested structure in at most two collectives.

What the ranks announce (see `announcing`) holds the data too when they are small; otherwise one more all-gather brings
them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from accel_ops.announcing import SAME_BUT_FIRST, Announced, Operation, announce, words_of
from accel_ops.gather_payload import HEADER_WORDS, GatherPayload, Sizes, aligned, join_small, payload_of
from accel_ops.nested import flatten, rebuild
from accel_ops.packing import SMALL_BYTES, as_bytes, pack_into, signature_of, unpack
from accel_ops.transport import TorchTransport, Transport, transport_of
from accel_state.processes import PartialState


def gather_leaves(data: Any, operation: str, state: PartialState, group: Any = None) -> Any:
    """All-gather each leaf, concatenated along dimension 0, whose size may differ between ranks.

    Args:
        data: Nested tensors; a 0-dim leaf counts as one of shape (1,).
        operation: The collective's name, for errors.
        state: The process state; there must be several processes.
        group: The process group; the default one when None.

    Returns:
        The same structure, on the devices of the leaves given.

    Raises:
        TypeError: When a leaf is not a tensor.
        DistributedOperationException: On all processes, when they call different collectives, or structures, dtypes or
            shapes (except for dimension 0) differ.
    """
    leaves, structure = flatten(data, operation)  # also without leaves: other ranks may have some, and would hang
    transport = transport_of(state) if group is None else TorchTransport(group)
    world = state.num_processes if group is None else dist.get_world_size(group)
    wire = transport.collective_device(state)
    moved = [leaf if leaf.device == wire else leaf.to(wire) for leaf in leaves]
    payload = payload_of((operation, structure), signature_of(moved))
    with torch.no_grad():
        announced = announce(moved, payload, Operation(operation, data, SAME_BUT_FIRST, group), transport, world, wire)
        joined = _joined(moved, payload, announced, transport, world)
    if moved is not leaves:
        joined = [
            part if part.device == leaf.device else part.to(leaf.device)
            for part, leaf in zip(joined, leaves, strict=True)
        ]
    return rebuild(data, joined)


def _joined(
    leaves: list[torch.Tensor], payload: GatherPayload, announced: Announced, transport: Transport, world: int
) -> list[torch.Tensor]:
    sizes = announced.sizes
    if sizes is None:  # too many leaves for a slot: their sizes are in the payload
        buffers = transport.all_gather(payload.full_payload(leaves, announced.longest), world)
        sizes = tuple([tuple(row[HEADER_WORDS:]) for row in words_of(buffers, HEADER_WORDS + payload.num_leaves)])
        return _join(buffers[:, payload.data_start :], payload, sizes)
    if not payload.all_fit(sizes):
        return _gather_payloads(leaves, payload, transport, sizes)
    if announced.slots.numel() <= SMALL_BYTES:
        return join_small(announced.slots, payload, sizes)
    return _join(announced.data(payload), payload, sizes)


def _gather_payloads(
    leaves: list[torch.Tensor], payload: GatherPayload, transport: Transport, sizes: Sizes
) -> list[torch.Tensor]:
    """The second collective: all-gather the payloads, which did not fit into slots."""
    if len(leaves) == 1 and all(row == sizes[0] for row in sizes):  # directly into the result, without a copy
        leaf = leaves[0].contiguous()
        joined = leaf.new_empty(len(sizes) * leaf.shape[0], *leaf.shape[1:])
        transport.all_gather(as_bytes(leaf), len(sizes), out=as_bytes(joined))
        return [joined]
    length = aligned(max(payload.layout_for(row).num_bytes for row in sizes))
    buffer = torch.empty(length, dtype=torch.uint8, device=leaves[0].device)
    pack_into(buffer[: payload.layout.num_bytes], leaves, payload.layout)
    return _join(transport.all_gather(buffer, len(sizes)), payload, sizes)


def _join(rows: torch.Tensor, payload: GatherPayload, sizes: Sizes) -> list[torch.Tensor]:
    """The concatenated leaves, from one row of packed data per rank."""
    if all(row == sizes[0] for row in sizes):
        layout = payload.layout_for(sizes[0])
        return unpack(rows[:, : layout.num_bytes], layout)
    per_process = []
    for row, dim0_sizes in zip(rows, sizes, strict=True):
        layout = payload.layout_for(dim0_sizes)
        per_process.append(unpack(row[: layout.num_bytes], layout))
    return [torch.cat(parts) for parts in zip(*per_process, strict=True)]
