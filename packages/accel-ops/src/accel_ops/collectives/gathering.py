"""All-gather any nested structure: in two collectives, if it is not large.

What the ranks announce (see `announcing`) holds the data too when they are small and in CPU memory; otherwise they follow,
in buckets. The host never waits for an accelerator: announcements go between hosts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from accel_ops.collectives.announcing import SAME_BUT_FIRST, Operation, announce
from accel_ops.collectives.packing import (
    SMALL_BYTES,
    PackedLayout,
    as_bytes,
    buckets_of,
    layout_of,
    pack,
    pack_into,
    signature_of,
    unpack,
)
from accel_ops.collectives.payload import GatherPayload, Sizes, aligned, join_small, payload_of
from accel_ops.collectives.transport import CPU, TorchTransport, Transport, transport_of
from accel_ops.nested import flatten, rebuild
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
    with torch.no_grad():
        if wire.type != "cpu" and leaves and all([leaf.ndim == 0 for leaf in leaves]):  # no sizes to learn
            joined = _gather_packed(_moved(leaves, wire), layout_of(signature_of(leaves)), transport, world)
        else:
            hosts = transport if wire.type == "cpu" else transport.between_hosts(state)
            called = Operation(operation, data, SAME_BUT_FIRST)
            joined = _gather_announced(leaves, (operation, structure), called, (hosts, transport), wire, world)
    return rebuild(
        data,
        [
            part if part.device == leaf.device else part.to(leaf.device)
            for part, leaf in zip(joined, leaves, strict=True)
        ],
    )


def _moved(leaves: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return [leaf if leaf.device == device else leaf.to(device) for leaf in leaves]


def _gather_announced(
    leaves: list[torch.Tensor],
    agreed: tuple[Any, ...],
    operation: Operation,
    transports: tuple[Transport, Transport],
    wire: torch.device,
    world: int,
) -> list[torch.Tensor]:
    """The leaves of all ranks, whose sizes in dimension 0 they announce first.

    Args:
        leaves: The data of this rank.
        agreed: What must be equal on all ranks, besides shapes and dtypes.
        operation: For the error.
        transports: Between hosts, and between devices; the same one where data are in CPU memory.
        wire: The device of the buffers of the second.
        world: The number of ranks.
    """
    hosts, devices = transports
    slots_on = wire if hosts is devices else CPU
    is_elsewhere = hosts is not devices and any([leaf.device != CPU for leaf in leaves])
    if not is_elsewhere:
        leaves = _moved(leaves, slots_on)
    payload = payload_of(agreed, signature_of(leaves), is_elsewhere)
    announced = announce(leaves, payload, operation, hosts, world, slots_on)
    if announced.is_complete:
        if announced.slots.numel() <= SMALL_BYTES:
            return join_small(announced.slots, payload, announced.sizes)
        return _join(announced.data(payload), payload, announced.sizes)
    if announced.is_elsewhere:  # on the device of any rank
        return _gather_buckets(_moved(leaves, wire), payload, devices, announced.sizes)
    return _gather_buckets(leaves, payload, hosts, announced.sizes)


def _gather_packed(
    leaves: list[torch.Tensor], layout: PackedLayout, transport: Transport, world: int
) -> list[torch.Tensor]:
    """The leaves of all ranks, which have the same shapes, in one collective."""
    return unpack(transport.all_gather(pack(leaves, layout), world), layout)


def _gather_buckets(
    leaves: list[torch.Tensor], payload: GatherPayload, transport: Transport, sizes: Sizes
) -> list[torch.Tensor]:
    """The collectives after the announcement: all-gather what did not fit into slots."""
    joined = list(leaves)
    for bucket in _buckets(payload, sizes):
        members = [leaves[index] for index in bucket]
        part = payload if len(bucket) == len(leaves) else payload_of((), signature_of(members))
        sizes_of_part = tuple([tuple([row[index] for index in bucket]) for row in sizes])
        for index, result in zip(bucket, _gather_bucket(members, part, transport, sizes_of_part), strict=True):
            joined[index] = result
    return joined


@lru_cache(maxsize=256)
def _buckets(payload: GatherPayload, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
    """Buckets of leaves by the bytes of all ranks, which are the same everywhere."""
    shapes = [
        (dtype, (sum(counts), *trailing))
        for (dtype, trailing), *counts in zip(payload.trailing_shapes, *sizes, strict=True)
    ]
    return buckets_of(tuple(shapes))


def _gather_bucket(
    leaves: list[torch.Tensor], payload: GatherPayload, transport: Transport, sizes: Sizes
) -> list[torch.Tensor]:
    is_even = all(row == sizes[0] for row in sizes)
    if len(leaves) == 1 and is_even:  # directly into the result, without a copy
        leaf = leaves[0].contiguous()
        joined = leaf.new_empty(len(sizes) * (leaf.shape[0] if leaf.ndim else 1), *leaf.shape[1:])
        transport.all_gather(as_bytes(leaf), len(sizes), out=as_bytes(joined))
        return [joined]
    if is_even:
        return _gather_packed(leaves, payload.layout, transport, len(sizes))
    length = aligned(max(payload.layout_for(row).num_bytes for row in sizes))
    buffer = leaves[0].new_empty(length, dtype=torch.uint8)
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
