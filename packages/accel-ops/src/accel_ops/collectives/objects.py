"""Collectives of picklable Python objects, announced as those of tensors are."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from accel_ops.collectives.announcing import SAME_LENGTH, Operation, announce
from accel_ops.collectives.packing import signature_of
from accel_ops.collectives.payload import GatherPayload, payload_of
from accel_ops.collectives.transport import transport_of
from accel_state.processes import PartialState, kind_of

SMALLEST_COMPILED_BYTES = 2**20


def gather_object(object: Any) -> Any:  # the keyword is part of the interface
    """Collect the items of picklable lists (or other iterables) of all processes in one list.

    Args:
        object: On each process, an iterable of picklable items.

    Returns:
        The items in the order of processes; with one process, `object` itself.

    Raises:
        TypeError: When it is not iterable, such as an int: wrap it in a list.
        DistributedOperationException: On all processes, when another one calls a different collective.
    """
    state = PartialState()
    if state.num_processes == 1:
        return object
    _check_sends_objects(state, "gather_object")
    if not hasattr(object, "__iter__"):
        raise TypeError(
            f"gather_object joins lists, but got {object!r} of type {type(object).__name__}: pass [{object!r}]."
        )
    rows = _gather_payloads(pickled(object), Operation("gather_object", object), state)
    return [item for row in rows for item in unpickled(row)]


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Broadcast the picklable items of one process's list to all.

    Args:
        object_list: Lists of equal length; overwritten on the other processes.
        from_process (`int`): The source rank.

    Returns:
        `object_list`.

    Raises:
        ValueError: When there is no such rank.
        DistributedOperationException: On all processes, when lengths differ or another one calls a different collective.
    """
    state = PartialState()
    if state.num_processes == 1:
        return object_list
    _check_sends_objects(state, "broadcast_object_list")
    check_source(from_process, state)
    is_source = state.process_index == from_process
    payload = pickled(list(object_list)) if is_source else torch.empty(0, dtype=torch.uint8, device="cpu")
    operation = Operation("broadcast_object_list", object_list, SAME_LENGTH)
    received = _broadcast_payload(payload, operation, from_process, state)
    if not is_source:
        object_list[:] = unpickled(received)
    return object_list


def check_source(from_process: int, state: PartialState) -> None:
    """Raise an error if `from_process` is not a rank of this run."""
    if not 0 <= from_process < state.num_processes:
        raise ValueError(
            f"from_process={from_process!r} is not a rank of this run: choose one from 0 to {state.num_processes - 1}."
        )


def _gather_payloads(payload: torch.Tensor, operation: Operation, state: PartialState) -> list[torch.Tensor]:
    """The bytes of every rank; uint8 of shape (bytes of that rank,) each."""
    transport, world = transport_of(state).between_hosts(state), state.num_processes
    wire = transport.collective_device(state)
    payload = payload.to(wire)
    message = payload_of((operation.name,), signature_of([payload]))
    announced = announce([payload], message, operation, transport, world, wire)
    counts = _counts(announced.sizes)
    if announced.is_complete:
        rows = announced.data(message)
    else:
        buffer = payload.new_zeros(_buffer_size(max(counts), wire))
        buffer[: len(payload)] = payload
        rows = transport.all_gather(buffer, world)
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


def _broadcast_payload(payload: torch.Tensor, operation: Operation, source: int, state: PartialState) -> torch.Tensor:
    """Broadcast the bytes of one rank: within the announcement when they fit there, by a broadcast otherwise.

    Args:
        payload: uint8 of shape (bytes,); empty on all ranks but `source`.
        operation: For the error.
        source: The source rank.
        state: The process.

    Returns:
        uint8 of shape (bytes of the source,).
    """
    transport = transport_of(state).between_hosts(state)
    wire = transport.collective_device(state)
    payload = payload.to(wire)
    message: GatherPayload = payload_of((operation.name, len(operation.data), source), signature_of([payload]))
    announced = announce([payload], message, operation, transport, state.num_processes, wire)
    count = _counts(announced.sizes)[source]
    if announced.is_complete:
        return announced.data(message)[source, :count]
    size = _buffer_size(count, wire)
    if state.process_index == source:
        buffer = torch.cat([payload, payload.new_zeros(size - count)]) if size > count else payload
    else:
        buffer = payload.new_empty(size)
    return transport.broadcast(buffer, source, state.process_index)[:count]


def _buffer_size(num_bytes: int, wire: torch.device) -> int:
    """The bytes to send for so many: where devices compile each size, the next power of two, from 1 MiB on."""
    if not kind_of(wire).compiles_collectives:
        return num_bytes
    return max(SMALLEST_COMPILED_BYTES, 1 << (num_bytes - 1).bit_length())


def _counts(sizes: Any) -> list[int]:
    return [row[0] for row in sizes]


def pickled(value: Any) -> torch.Tensor:
    """The bytes of a picklable object (uint8, one dimension, in CPU memory)."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)  # a copy: bytes cannot be written to


def unpickled(payload: torch.Tensor) -> Any:
    """Unpickle what a rank of this run has pickled."""
    content = bytearray(payload.numel())
    torch.frombuffer(content, dtype=torch.uint8).copy_(payload)  # works without NumPy
    return pickle.loads(content)


def _check_sends_objects(state: PartialState, operation: str) -> None:
    if not transport_of(state).sends_objects:
        raise NotImplementedError(f"{operation} cannot send Python objects between XLA devices: send tensors instead.")
