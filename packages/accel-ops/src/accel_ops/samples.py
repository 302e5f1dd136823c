"""Predictions of any structure: samples of several ranks joined, and the first samples of a batch.

A list holds samples; so do a tensor, along its first dimension, and a tuple of plain items, as torch's collate function makes one
of strings. Mappings and tuples of such leaves are structure, and so are lists of tensors beside other leaves. Other leaves, such as a loss, belong to the batch as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accel_ops.nested import honor_mapping, honor_type

CONTAINERS = (list, tuple, Mapping)


def join_samples(batches: Sequence[Any], *, by_rows: bool = False) -> Any:
    """Join what the ranks have, leaf by leaf.

    Args:
        batches: One structure for each rank; mappings have the same keys, and tuples the same length.
        by_rows: Make a list of rows of a tensor, whose sizes may differ between ranks.

    Returns:
        The same structure. Lists and tuples of samples become one list; tensors of shape (samples, ...) are concatenated, or become
        a list of rows where their other sizes or dtypes differ; of other leaves there is a list with one item for each rank.

    Raises:
        ValueError: The ranks have different structures.
    """
    first = batches[0]
    if any(_structure_of(batch) != _structure_of(first) for batch in batches):
        kinds = ", ".join(f"{_structure_of(batch)!r} on rank {rank}" for rank, batch in enumerate(batches))
        raise ValueError(
            f"gather_for_metrics joins the same structure on all ranks, but got {kinds}. Pass the same keys and as many items "
            "on each rank, and lists for samples."
        )
    if isinstance(first, Mapping):
        return honor_mapping(
            first, {key: join_samples([one[key] for one in batches], by_rows=by_rows) for key in first}
        )
    if _is_structure(first):
        return honor_type(first, (join_samples(items, by_rows=by_rows) for items in zip(*batches, strict=True)))
    if isinstance(first, torch.Tensor):
        return _join_tensors(batches, by_rows)
    if isinstance(first, str) or not hasattr(first, "__iter__"):
        return list(batches)
    return [sample for samples in batches for sample in samples]


def first_samples(data: Any, count: int, total: int | None = None) -> Any:
    """The first samples of every leaf that has samples.

    Args:
        data: As for `join_samples`, or what it returned.
        count: How many to keep.
        total: How many there are: leaves of another length stay as they are. None to shorten all leaves.
    """
    if isinstance(data, Mapping):
        return honor_mapping(data, {key: first_samples(value, count, total) for key, value in data.items()})
    if _is_structure(data):
        return honor_type(data, (first_samples(item, count, total) for item in data))
    has_samples = data.ndim > 0 if isinstance(data, torch.Tensor) else isinstance(data, (list, tuple))
    return data[:count] if has_samples and total in (None, len(data)) else data


def num_samples(data: Any) -> int | None:
    """The length of the first leaf that has samples; None when there is none."""
    if isinstance(data, Mapping) or _is_structure(data):
        sizes = map(num_samples, data.values() if isinstance(data, Mapping) else data)
        return next((size for size in sizes if size is not None), None)
    if isinstance(data, torch.Tensor):
        return data.shape[0] if data.ndim else None
    return len(data) if isinstance(data, (list, tuple)) else None


def _is_structure(data: Any) -> bool:
    """Whether a tuple or list is one of leaves: with tensors beside other items; a tuple also with containers in it."""
    if not isinstance(data, (tuple, list)):
        return False
    num_tensors = sum(isinstance(item, torch.Tensor) for item in data)
    holds_containers = isinstance(data, tuple) and any(isinstance(item, CONTAINERS) for item in data)
    return holds_containers or 0 < num_tensors < len(data)


def _structure_of(data: Any) -> Any:
    if isinstance(data, Mapping):
        return list(data)
    return len(data) if _is_structure(data) else "samples"


def _join_tensors(tensors: Sequence[torch.Tensor], by_rows: bool) -> Any:
    if any(tensor.ndim == 0 for tensor in tensors):
        return list(tensors)
    kinds = {(tensor.shape[1:], tensor.dtype, tensor.device) for tensor in tensors}
    if by_rows or len(kinds) > 1:
        return [row for tensor in tensors for row in tensor]
    return torch.cat(list(tensors))
