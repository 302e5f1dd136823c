"""Dividing a batch of inputs between processes: arithmetic on lengths, without any communication."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def share_of(length: int, rank: int, num_processes: int) -> range:
    """The positions out of `length` that a process gets; shares differ by one at most, the first ones are longer."""
    each, longer = divmod(length, num_processes)
    start = rank * each + min(rank, longer)
    return range(start, start + each + (rank < longer))


def split(
    inputs: Any, rank: int, num_processes: int, *, apply_padding: bool = False, device: torch.device | None = None
) -> Any:
    """The part of `inputs` that belongs to one process.

    Args:
        inputs: A list, tuple or other sequence, a tensor or array (divided along its first dimension), a
            `datasets.Dataset`, or a dictionary of these that all have the same length. Text is not divided.
        rank: The process, from 0.
        num_processes: How many share the inputs.
        apply_padding: Fill short parts up with the last of all inputs, so that all parts have the same length.
        device: Where tensors of filled-up parts are moved, ready to be gathered.

    Returns:
        The part, of the same type (a named tuple becomes a plain one).

    Raises:
        TypeError: For inputs that have no length.
        ValueError: For a dictionary whose values differ in length.
    """
    if num_processes == 1:
        return inputs
    _length(inputs)  # complains before anything is divided
    return _split(inputs, rank, num_processes, device if apply_padding else None, apply_padding)


def _split(inputs: Any, rank: int, num_processes: int, device: torch.device | None, apply_padding: bool) -> Any:
    if isinstance(inputs, Mapping):
        return {key: _split(value, rank, num_processes, device, apply_padding) for key, value in inputs.items()}
    if isinstance(inputs, (str, bytes)):
        return inputs
    length = len(inputs)
    share = share_of(length, rank, num_processes)
    num_missing = -(-length // num_processes) - len(share) if apply_padding and length else 0
    if _is_dataset(inputs):
        return inputs.select([*share, *[length - 1] * num_missing])
    part = inputs[share.start : share.stop]
    if isinstance(inputs, torch.Tensor):
        if num_missing:
            part = torch.cat([part, inputs[-1:].expand(num_missing, *inputs.shape[1:])])
        return part if device is None else part.to(device)
    if not num_missing:
        return part
    if isinstance(inputs, (list, tuple)):
        return part + inputs[-1:] * num_missing
    return _pad_other(inputs, part, num_missing)


def _pad_other(inputs: Any, part: Any, num_missing: int) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(inputs, numpy.ndarray):
        return numpy.concatenate([part, *[inputs[-1:]] * num_missing])
    return [*part, *[inputs[-1]] * num_missing]  # a range, for one, cannot repeat its last value


def _length(inputs: Any, name: str = "inputs") -> int:
    """How many items there are to divide.

    Raises:
        TypeError: For something that cannot be divided.
        ValueError: For a dictionary whose values differ in length.
    """
    if isinstance(inputs, Mapping):
        lengths = {
            key: _length(value, f"{name}[{key!r}]")
            for key, value in inputs.items()
            if not isinstance(value, (str, bytes))
        }
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{key!r}: {length}" for key, length in lengths.items())
            raise ValueError(
                f"The values of {name} differ in length ({found}): only equally long ones can be divided between "
                "processes. Split them one by one, or make them equally long."
            )
        return next(iter(lengths.values()), 0)
    divisible = isinstance(inputs, (Sequence, torch.Tensor)) or _is_array(inputs) or _is_dataset(inputs)
    if not divisible or (isinstance(inputs, torch.Tensor) and inputs.ndim == 0):
        raise TypeError(
            f"{name} is {reprlib.repr(inputs)} of type {type(inputs).__name__}, which cannot be divided between processes: give a "
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
