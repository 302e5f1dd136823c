"""Splitting a batch of inputs between processes: arithmetic on lengths, without any communication."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def slice_of(length: int, rank: int, num_processes: int) -> range:
    """The positions out of `length` that a process gets; slices differ by one at most, the first ones are longer."""
    each, longer = divmod(length, num_processes)
    start = rank * each + min(rank, longer)
    return range(start, start + each + (rank < longer))


def split(
    inputs: Any, rank: int, num_processes: int, *, apply_padding: bool = False, device: torch.device | None = None
) -> Any:
    """The slice of `inputs` of one process.

    Args:
        inputs: A list, tuple or other sequence, a tensor or array (split along its first dimension), a
            `datasets.Dataset`, or a dictionary of these that all have the same length. A str is not split.
        rank: The rank of the process.
        num_processes: The number of processes.
        apply_padding: Pad short slices with the last of all inputs, so that all have the same length.
        device: Device to which padded tensors are moved, so that they can be gathered.

    Returns:
        The slice, of the same type (a named tuple becomes a plain one).

    Raises:
        TypeError: For inputs without a length.
        ValueError: For a dictionary whose values differ in length.
    """
    if num_processes == 1:
        return inputs
    _length(inputs)  # raises before anything is split
    return _split(inputs, rank, num_processes, device if apply_padding else None, apply_padding)


def _split(inputs: Any, rank: int, num_processes: int, device: torch.device | None, apply_padding: bool) -> Any:
    if isinstance(inputs, Mapping):
        return {key: _split(value, rank, num_processes, device, apply_padding) for key, value in inputs.items()}
    if isinstance(inputs, (str, bytes)):
        return inputs
    length = len(inputs)
    positions = slice_of(length, rank, num_processes)
    num_missing = -(-length // num_processes) - len(positions) if apply_padding and length else 0
    if _is_dataset(inputs):
        return inputs.select([*positions, *[length - 1] * num_missing])
    piece = inputs[positions.start : positions.stop]
    if isinstance(inputs, torch.Tensor):
        if num_missing:
            piece = torch.cat([piece, inputs[-1:].expand(num_missing, *inputs.shape[1:])])
        return piece if device is None else piece.to(device)
    if not num_missing:
        return piece
    if isinstance(inputs, (list, tuple)):
        return piece + inputs[-1:] * num_missing
    if _is_array(inputs):
        return sys.modules["numpy"].concatenate([piece, *[inputs[-1:]] * num_missing])
    return [*piece, *[inputs[-1]] * num_missing]  # a range, for one, cannot repeat its last value


def _length(inputs: Any, name: str = "inputs") -> int:
    """The number of items to split.

    Raises:
        TypeError: For something that cannot be split.
        ValueError: For a dictionary whose values differ in length.
    """
    if isinstance(inputs, Mapping):
        lengths = {
            key: _length(value, f"{name}[{key!r}]")
            for key, value in inputs.items()
            if not isinstance(value, (str, bytes))
        }
        if len(set(lengths.values())) > 1:
            listing = ", ".join(f"{key!r}: {length}" for key, length in lengths.items())
            raise ValueError(
                f"The values of {name} differ in length ({listing}): only values of one length can be split between "
                "processes. Split them one by one, or pad them to one length."
            )
        return next(iter(lengths.values()), 0)
    divisible = isinstance(inputs, (Sequence, torch.Tensor)) or _is_array(inputs) or _is_dataset(inputs)
    if not divisible or (isinstance(inputs, torch.Tensor) and inputs.ndim == 0):
        raise TypeError(
            f"{name} is {reprlib.repr(inputs)} of type {type(inputs).__name__}, which cannot be split between processes: pass a "
            "list, a tuple, a tensor with at least one dimension, a datasets.Dataset, or a dictionary of these."
        )
    return len(inputs)


def _is_array(inputs: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(inputs, numpy.ndarray) and inputs.ndim > 0


def _is_dataset(inputs: Any) -> bool:
    datasets = sys.modules.get("datasets")
    dataset_class = getattr(datasets, "Dataset", None)
    return dataset_class is not None and isinstance(inputs, dataset_class)
