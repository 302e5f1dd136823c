"""Nested structures: lists, tuples, named tuples and mappings with tensors at the leaves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from accel_state.public_names import known_as


@known_as("accelerate.utils.dataclasses.TensorInformation")
@dataclass
class TensorInformation:
    """Shape and dtype of a tensor, without its values."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: Any) -> bool:
    """Whether it is a `torch.Tensor`."""
    return isinstance(tensor, torch.Tensor)


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Whether it is a tensor on an Intel GPU."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "xpu"


def is_tensor_information(tensor_info: Any) -> bool:
    """Whether it is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Whether it is an instance of a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Make an object of the type of `obj` (a list, tuple or named tuple) from the items of `generator`."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def honor_mapping(obj: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Make a mapping of the type of `obj`, a `defaultdict` with its factory, of `items`."""
    mapping_type: Any = type(obj)
    return mapping_type(obj.default_factory, items) if isinstance(obj, defaultdict) else mapping_type(items)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to every leaf of a nested structure.

    Args:
        func: Called as `func(leaf, *args, **kwargs)`.
        data: Nested lists, tuples, named tuples and mappings.
        *args: For `func`.
        test_type: Whether an object is a leaf; by default, tensors are.
        error_on_other_type (`bool`): Raise an error for anything else, instead of returning it unchanged.
        **kwargs: For `func`.

    Returns:
        The results in a structure of the same types.

    Raises:
        TypeError: For another object, with `error_on_other_type`.
    """
    if isinstance(data, (tuple, list)):
        items = (
            recursively_apply(
                func, item, *args, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs
            )
            for item in data
        )
        return honor_type(data, items)
    if isinstance(data, Mapping):
        values = {
            key: recursively_apply(
                func, item, *args, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs
            )
            for key, item in data.items()
        }
        return honor_mapping(data, values)
    if test_type(data):
        return func(data, *args, **kwargs)
    if error_on_other_type:
        name = getattr(func, "__name__", "this operation")
        raise TypeError(
            f"{name} got {data!r} of type {type(data).__name__}: only tensors, and nested lists, tuples and "
            "dictionaries of tensors, are supported."
        )
    return data


def flatten(data: Any, operation: str) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """Flatten a nested structure of tensors into a list of leaves.

    Args:
        data: Nested lists, tuples, named tuples and mappings of tensors.
        operation: The calling operation, for the error.

    Returns:
        The leaves in order, and a hashable description of the structure around them.

    Raises:
        TypeError: When a leaf is not a tensor.
    """
    if isinstance(data, torch.Tensor):
        return [data], ()
    leaves: list[torch.Tensor] = []
    structure: list[Any] = []
    _visit(data, leaves, structure, operation)
    return leaves, tuple(structure)


def _visit(data: Any, leaves: list[torch.Tensor], structure: list[Any], operation: str) -> None:
    items: Iterable[Any]
    if isinstance(data, (list, tuple)):
        structure.append((len(leaves), len(data)))
        items = data
    elif isinstance(data, Mapping):
        structure.append((len(leaves), *data))
        items = data.values()
    else:
        raise TypeError(
            f"{operation} got {data!r} of type {type(data).__name__}: only tensors, and nested lists, tuples and "
            "dictionaries of tensors, can be sent between processes. Convert it to a tensor, or gather it as an object."
        )
    for item in items:
        if isinstance(item, torch.Tensor):  # here, because a call for each leaf would take as long as the rest
            leaves.append(item)
        else:
            _visit(item, leaves, structure, operation)


def rebuild(data: Any, leaves: Iterable[Any]) -> Any:
    """Put leaves, in the order of `flatten`, into a structure like `data`."""
    return _put(data, iter(leaves))


def _put(data: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(data, torch.Tensor):
        return next(leaves)
    if type(data) is list:
        return [next(leaves) if isinstance(item, torch.Tensor) else _put(item, leaves) for item in data]
    if isinstance(data, Mapping):
        return honor_mapping(data, {key: _put(item, leaves) for key, item in data.items()})
    return honor_type(data, (_put(item, leaves) for item in data))


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Copy `source` into `destination`, dictionaries within dictionaries included; returns `destination`."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Follow a dotted path of attributes, such as `"encoder.layer.0"`."""
    for name in attr.split("."):
        obj = getattr(obj, name)
    return obj
