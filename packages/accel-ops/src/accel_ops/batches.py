"""Batches: their size, slicing, concatenation and padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accel_ops.nested import TensorInformation, honor_type, is_tensor_information, recursively_apply


def find_batch_size(data: Any) -> int | None:
    """The size of the first dimension of the first tensor in a nested structure.

    Raises:
        ValueError: For an empty structure, or a tensor without dimensions.
        TypeError: When something other than a tensor comes first.
    """
    while not isinstance(data, torch.Tensor):
        if not isinstance(data, (list, tuple, Mapping)):
            raise TypeError(
                f"A batch's size is that of its first tensor, but {data!r} of type {type(data).__name__} came first."
            )
        if not data:
            raise ValueError(f"An empty {type(data).__name__} has no batch size: {data!r}.")
        data = next(iter(data.values())) if isinstance(data, Mapping) else data[0]
    if data.ndim == 0:
        raise ValueError(f"A tensor without dimensions has no batch size: {data!r}.")
    return data.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """`find_batch_size`, or None where there is no answer."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError, IndexError):
        return None


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Cut every tensor along its first dimension.

    Args:
        data: Nested tensors.
        tensor_slice: What to keep.
        process_index: For functions that take the place of this one; not used here.
        num_processes: Likewise.
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Join a list of structures of the same shape, leaf by leaf.

    Args:
        data: A list or tuple of nested tensors. A single structure may hold other leaves, too.
        dim: Along which dimension.

    Raises:
        TypeError: When a leaf of several structures is no tensor.
    """
    first = data[0]
    if isinstance(first, (tuple, list)):
        return honor_type(first, (concatenate([item[index] for item in data], dim) for index in range(len(first))))
    if isinstance(first, Mapping):
        made: Any = type(first)
        return made({key: concatenate([item[key] for item in data], dim) for key in first})
    if not isinstance(first, torch.Tensor):
        if len(data) == 1:
            return first
        raise TypeError(f"Only tensors can be concatenated, not {first!r} of type {type(first).__name__}.")
    return torch.cat(list(data), dim=dim)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Pad a batch with zeros so that it divides evenly over processes.

    Args:
        tensor: Nested tensors whose dimension `dim` has `batch_size` elements; others are kept.
        batch_size: Its size now.
        num_processes: Its size becomes the next multiple of this.
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
    """Turn every tensor into nested lists of Python numbers."""

    def to_list(tensor: torch.Tensor) -> Any:
        tensor = tensor.detach().cpu()
        # numpy-less conversions of bfloat16 lose nothing in float32
        return tensor.float().tolist() if tensor.dtype == torch.bfloat16 else tensor.tolist()

    return recursively_apply(to_list, data)


def get_data_structure(data: Any) -> Any:
    """Replace every tensor by its `TensorInformation`."""
    return recursively_apply(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Replace every tensor by the list of its sizes."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Make uninitialised tensors from what `get_data_structure` returned."""
    return recursively_apply(
        lambda info: torch.empty(*info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )
