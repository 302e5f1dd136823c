"""Collectives over nested structures: one or two of `torch.distributed`, however many tensors there are, unless they are large."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal

import torch

from accel_ops.collectives.announcing import SAME_DIMENSIONS, SAME_SHAPES, Operation, announce
from accel_ops.collectives.gathering import gather_leaves
from accel_ops.collectives.objects import check_source, gather_object
from accel_ops.collectives.packing import as_bytes, buckets_of, layout_of, pack, signature_of, unpack
from accel_ops.collectives.payload import SLOT_BYTES, payload_of
from accel_ops.collectives.reducing import reduce_leaves, with_own_gradients
from accel_ops.collectives.transport import Reduction, Transport, transport_of
from accel_ops.collectives.verification import verify_operation
from accel_ops.nested import flatten, rebuild, recursively_apply
from accel_state.processes import PartialState
from accel_state.public_names import known_as
from accel_state.warning import warn_user


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


HOW: dict[str, Reduction] = {"mean": "sum", "sum": "sum", "max": "max", "min": "min"}


@known_as("accelerate.utils.operations.CannotPadNestedTensorWarning")
class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor cannot be padded and is returned unchanged."""


def gather(tensor: Any) -> Any:
    """All-gather tensors, concatenated along dimension 0, whose size may differ between processes.

    Args:
        tensor: A tensor or nested structure of tensors. 0-dim tensors count as ones of shape (1,).

    Returns:
        The same structure; with one process, `tensor` itself.

    Raises:
        TypeError: When a leaf is not a tensor.
        DistributedOperationException: On all processes, when structures, dtypes or shapes (except for dimension 0) differ.

    Example:
        ```python
        losses = gather(loss)  # shape (num_processes,)
        ```
    """
    state = PartialState()
    if state.num_processes == 1:
        return tensor
    return gather_leaves(tensor, "gather", state)


@verify_operation
def reduce(tensor: Any, reduction: Literal["mean", "sum", "none", "max", "min"] = "mean", scale: float = 1.0) -> Any:
    """All-reduce tensors: sum, mean, maximum or minimum over processes.

    Args:
        tensor: A tensor or nested structure of tensors, of the same shapes on all processes; not changed.
        reduction (`"mean"`, `"sum"`, `"max"`, `"min"` or `"none"`): "none" returns `tensor` itself.
        scale (`float`): A factor for the result; XLA only.

    Returns:
        The same structure with results of the same dtypes; means of integers become floats. Gradients of sums and means
        flow to the tensors of this process alone: multiplied by 1, or by 1 / `num_processes`.

    Raises:
        TypeError: When a leaf is not a tensor.
        ValueError: For another `reduction`.
        DistributedOperationException: On all processes, when shapes or dtypes differ or another one calls a different
            collective; with buffers on an accelerator this is not checked, because reading the announcements of others
            would synchronize with the device.
    """
    if reduction == "none":
        return tensor
    if reduction not in HOW:
        raise ValueError(f"reduction={reduction!r} is unknown: choose 'mean', 'sum', 'max', 'min' or 'none'.")
    state = PartialState()
    leaves, structure = flatten(tensor, "reduce")
    if state.num_processes == 1:
        return rebuild(tensor, [leaf.clone() for leaf in leaves])
    transport = transport_of(state)
    wire = transport.collective_device(state)
    factor = scale if transport.scales else 1.0
    if reduction == "mean":
        factor /= state.num_processes
    moved = [leaf if leaf.device == wire else leaf.to(wire) for leaf in leaves]
    operation = Operation("reduce", tensor, SAME_SHAPES)
    with torch.no_grad():
        results = reduce_leaves(
            moved, HOW[reduction], (reduction, structure), operation, transport, state.num_processes, factor
        )
    if wire != state.device:
        results = [result.to(leaf.device) for result, leaf in zip(results, leaves, strict=True)]
    return rebuild(tensor, with_own_gradients(leaves, results, HOW[reduction], factor))


@verify_operation
def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Broadcast the values of one process to all.

    Args:
        tensor: A tensor or nested structure of tensors, of the same shapes on all processes; overwritten on the others.
        from_process (`int`): The source rank.

    Returns:
        `tensor`, with those values. An expanded tensor, whose elements share memory, cannot be overwritten, so that
        the structure is made anew with another tensor in its place.

    Raises:
        TypeError: When a leaf is no tensor and there are several processes.
        ValueError: When there is no such rank.
        DistributedOperationException: As for `reduce`, and when `from_process` differs.
    """
    state = PartialState()
    check_source(from_process, state)
    if state.num_processes == 1:
        return tensor
    leaves, structure = flatten(tensor, "broadcast")
    expanded = [index for index, leaf in enumerate(leaves) if not leaf.is_contiguous() and 0 in leaf.stride()]
    for index in expanded:
        leaves[index] = leaves[index].detach().contiguous()
    transport = transport_of(state)
    broadcast_leaves(
        leaves,
        structure,
        Operation("broadcast", tensor, SAME_SHAPES),
        transport,
        transport.collective_device(state),
        from_process,
        state.process_index,
        state.num_processes,
    )
    return rebuild(tensor, leaves) if expanded else tensor


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Size, int]:
    """Broadcast the shape and dtype of a tensor that one process has.

    Args:
        tensor: The tensor on that process, None on the others.

    Returns:
        Its shape, and its dtype as a number of `TENSOR_INT_TO_DTYPE`.
    """
    _, shape, dtype = _find_holder(tensor)
    return torch.Size(shape), TENSOR_TYPE_TO_INT[dtype]


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Broadcast a tensor that one process has to all.

    Args:
        tensor: The tensor on that process, None on the others; these need not know its shape.

    Returns:
        The tensor, on each process's device.

    Raises:
        ValueError: On all processes, when none or several pass one.
    """
    state = PartialState()
    if state.num_processes == 1:
        if tensor is None:
            raise ValueError("copy_tensor_to_devices got None on the only process: pass the tensor.")
        return tensor.to(state.device)
    holder, shape, dtype = _find_holder(tensor)
    if tensor is None:
        tensor = torch.empty(shape, dtype=dtype)
    return broadcast(tensor.to(state.device), from_process=holder)


def _find_holder(tensor: torch.Tensor | None) -> tuple[int, Sequence[int], torch.dtype]:
    offered = gather_object([None if tensor is None else (tuple(tensor.shape), tensor.dtype)])
    holders = [rank for rank, spec in enumerate(offered) if spec is not None]
    if len(holders) != 1:
        raise ValueError(
            f"copy_tensor_to_devices: ranks {holders} passed a tensor. One rank must pass the tensor and all others None."
            if holders
            else "copy_tensor_to_devices: all ranks passed None. One rank must pass the tensor."
        )
    return holders[0], *offered[holders[0]]


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad tensors to the largest size that one dimension has on any process.

    Args:
        tensor: A tensor or nested structure of tensors.
        dim (`int`): The dimension; tensors without it are returned unchanged.
        pad_index: The padding value.
        pad_first (`bool`): Pad at the beginning.

    Returns:
        The same structure; leaves that are large enough already are not copied. Where processes pad a tensor of integers
        or bool with what its dtype cannot hold, all of them get torch's common dtype of the two: int64 for a mask
        padded with -100.

    Raises:
        TypeError: When a leaf is not a tensor.
        DistributedOperationException: On all processes, when the numbers of tensors or of their dimensions differ.
    """
    state = PartialState()
    leaves, _ = flatten(tensor, "pad_across_processes")
    if any(leaf.is_nested for leaf in leaves):
        warn_user(
            "A nested tensor cannot be padded and is returned unchanged: convert it to a padded tensor first "
            "(torch.nested.to_padded_tensor).",
            CannotPadNestedTensorWarning,
        )
    if state.num_processes == 1:
        return tensor
    local_sizes = [0 if leaf.is_nested or not -leaf.ndim <= dim < leaf.ndim else leaf.shape[dim] for leaf in leaves]
    largest = iter(_largest_sizes(local_sizes, tuple([leaf.dim() for leaf in leaves]), tensor, state))
    return recursively_apply(lambda leaf: _padded(leaf, dim, *next(largest), pad_index, pad_first), tensor)


def _largest_sizes(
    local_sizes: list[int], dimensions: tuple[int, ...], tensor: Any, state: PartialState
) -> list[tuple[int, bool]]:
    """The largest of each size on any rank, and whether others are smaller.

    The sizes go in the places of those in dimension 0 of an announcement.
    """
    transport = transport_of(state).between_hosts(state)
    operation = Operation("pad_across_processes", tensor, SAME_DIMENSIONS)
    payload = payload_of((operation.name, dimensions), tuple([(torch.uint8, (size,)) for size in local_sizes]), True)
    wire = transport.collective_device(state)
    announced = announce([], payload, operation, transport, state.num_processes, wire)
    return [(max(sizes), min(sizes) != max(sizes)) for sizes in zip(*announced.sizes, strict=True)]


def _padded(
    leaf: torch.Tensor, dim: int, size: int, is_ragged: bool, pad_index: float, pad_first: bool
) -> torch.Tensor:
    if leaf.is_nested or not -leaf.ndim <= dim < leaf.ndim or not is_ragged:
        return leaf
    leaf = leaf.to(_padded_dtype(leaf, pad_index))  # also on the ranks that have nothing to pad
    if leaf.shape[dim] == size:
        return leaf
    shape = list(leaf.shape)
    shape[dim] = size - leaf.shape[dim]
    padding = leaf.new_full(shape, pad_index)
    return torch.cat([padding, leaf] if pad_first else [leaf, padding], dim=dim)


def _padded_dtype(leaf: torch.Tensor, pad_index: float) -> torch.dtype:
    """A dtype that holds a tensor and its padding; a mask that is padded with 0 or 1 stays one."""
    if leaf.dtype.is_floating_point or leaf.dtype.is_complex or (leaf.dtype == torch.bool and pad_index in (0, 1)):
        return leaf.dtype
    return torch.result_type(leaf, pad_index)


def wait_for_everyone() -> None:
    """A barrier of all processes."""
    PartialState().wait_for_everyone()


TENSOR_TYPE_TO_INT: dict[torch.dtype, int] = {
    torch.float32: 1,
    torch.float64: 2,
    torch.float16: 3,
    torch.bfloat16: 4,
    torch.uint8: 5,
    torch.int8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.bool: 10,
}
TENSOR_INT_TO_DTYPE: dict[int, torch.dtype] = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}
