"""Broadcasting leaves in place: within the announcement when they are small, in buckets otherwise."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from accel_ops.collectives.announcing import Operation, announce
from accel_ops.collectives.packing import as_bytes, buckets_of, layout_of, pack, signature_of, unpack
from accel_ops.collectives.payload import SLOT_BYTES, payload_of
from accel_ops.collectives.transport import Transport


def broadcast_leaves(
    leaves: Sequence[torch.Tensor],
    agreed: Hashable,
    operation: Operation,
    transport: Transport,
    wire: torch.device,
    source: int,
    rank: int,
    world: int,
) -> None:
    """Overwrite leaves by those of one rank.

    Args:
        leaves: The tensors of this rank, of the same dtypes and shapes on all ranks.
        agreed: What must be equal on all ranks, besides shapes and dtypes.
        operation: For the error when ranks call something else.
        transport: Runs the collectives.
        wire: The device of its buffers.
        source: The source rank.
        rank: This rank.
        world: The number of ranks.

    Raises:
        DistributedOperationException: On all ranks, when shapes, dtypes or operations differ and the transport's
            device is the CPU. On another nothing is announced: the hosts would wait for each other.
    """
    signature = signature_of(leaves)
    if wire.type == "cpu":
        layout = layout_of(signature)
        sends_now = rank == source and layout.num_bytes <= SLOT_BYTES
        buffer = (
            pack(_on(leaves, wire), layout) if sends_now and leaves else torch.empty(0, dtype=torch.uint8, device=wire)
        )
        message = payload_of((operation.name, source, agreed, signature), signature_of([buffer]))
        announced = announce([buffer], message, operation, transport, world, wire)
        if layout.num_bytes <= SLOT_BYTES and announced.is_complete:
            if rank != source:
                _write(leaves, unpack(announced.data(message)[source, : layout.num_bytes], layout))
            return
    for bucket in buckets_of(signature):
        _broadcast_bucket([leaves[index] for index in bucket], transport, wire, source, rank)


def _broadcast_bucket(
    leaves: Sequence[torch.Tensor], transport: Transport, wire: torch.device, source: int, rank: int
) -> None:
    leaf, layout = leaves[0], layout_of(signature_of(leaves))
    is_plain = leaf.is_contiguous() and not leaf.is_conj() and not leaf.is_neg()
    if len(leaves) == 1 and leaf.device == wire and is_plain:
        buffer = as_bytes(leaf.detach())
        received = transport.broadcast(buffer, source, rank)
        if received is buffer:  # in place
            return
    else:  # as many bytes as on ranks whose only leaf needs no packing
        num_bytes = sum(group.num_bytes for group in layout.groups)
        packed = (
            pack(_on(leaves, wire), layout)
            if rank == source
            else leaf.new_empty(layout.num_bytes, dtype=torch.uint8, device=wire)
        )
        received = transport.broadcast(packed[:num_bytes], source, rank)
    if rank != source:
        _write(leaves, unpack(received, layout))


def _on(leaves: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return [leaf.detach().to(device) for leaf in leaves]


def _write(leaves: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for leaf, value in zip(leaves, values, strict=True):
            leaf.detach().copy_(value)
