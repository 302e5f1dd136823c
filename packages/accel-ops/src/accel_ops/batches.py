"""Batches: their size, slicing, concatenation and padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accel_ops.nested import TensorInformation, honor_mapping, honor_type, is_tensor_information, recursively_apply


def find_batch_size(data: Any) -> int | None:
    """The size of the first dimension of the first tensor in a nested structure.

    Raises:
        ValueError: For an empty structure, or a 0-dimensional tensor.
        TypeError: When something other than a tensor comes first.
    """
    while not isinstance(data, torch.Tensor):
        if not isinstance(data, (list, tuple, Mapping)):
            raise TypeError(
                f"The batch size is read from the first tensor, but {data!r} of type {type(data).__name__} came first."
            )
        if not data:
            raise ValueError(f"An empty {type(data).__name__} has no batch size: {data!r}.")
        data = next(iter(data.values())) if isinstance(data, Mapping) else data[0]
    if data.ndim == 0:
        raise ValueError(f"A 0-dimensional tensor has no batch size: {data!r}.")
    return data.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """`find_batch_size`, or None instead of an error."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError, IndexError):
        return None


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Slice every tensor along dimension 0.

    Args:
        data: Nested tensors.
        tensor_slice: The slice to keep.
        process_index: Not used here; for functions that replace this one (`slice_fn_for_dispatch`).
        num_processes: As above.
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Concatenate a list of nested structures, leaf by leaf.

    Args:
        data: A list or tuple of nested tensors. A single structure may hold other leaves, too.
        dim: The dimension.

    Raises:
        TypeError: When a leaf of several structures is not a tensor.
    """
    first = data[0]
    if isinstance(first, (tuple, list)):
        return honor_type(first, (concatenate([item[index] for item in data], dim) for index in range(len(first))))
    if isinstance(first, Mapping):
        return honor_mapping(first, {key: concatenate([item[key] for item in data], dim) for key in first})
    if not isinstance(first, torch.Tensor):
        if len(data) == 1:
            return first
        raise TypeError(f"Only tensors can be concatenated, not {first!r} of type {type(first).__name__}.")
    return torch.cat(list(data), dim=dim)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Pad a batch with zeros so that it splits evenly over processes.

    Args:
        tensor: Nested tensors; those whose dimension `dim` has another size than `batch_size` are not padded.
        batch_size: Its current size.
        num_processes: The padded size is the next multiple of this.
        dim: The dimension to pad.
    """
    missing = -batch_size % num_processes

    def pad(leaf: torch.Tensor) -> torch.Tensor:
        if not missing or leaf.ndim <= dim or leaf.shape[dim] != batch_size:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = missing
        return torch.cat([leaf, leaf.new_zeros(shape)], dim=dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)


def listify(data: Any) -> Any:
    """Convert every tensor to nested lists of Python numbers."""

    def to_list(tensor: torch.Tensor) -> Any:
        tensor = tensor.detach().cpu()
        # bfloat16 converts to float32 without loss, and needs no NumPy
        return tensor.float().tolist() if tensor.dtype == torch.bfloat16 else tensor.tolist()

    return recursively_apply(to_list, data)


def get_data_structure(data: Any) -> Any:
    """Replace every tensor by its `TensorInformation`."""
    return recursively_apply(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Replace every tensor by the list of its sizes."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Create uninitialised tensors from the result of `get_data_structure`."""
    return recursively_apply(
        lambda info: torch.empty(*info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )
