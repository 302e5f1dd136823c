"""How many bytes a model, its modules and its tensors take."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from accel_bigmodel.dtypes import as_dtype
from accel_ops.modules import walk
from accel_state.enums import CustomDtype

Sizes = Mapping[str, int]
CUSTOM_BYTES = {CustomDtype.FP8: 1, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}
UNITS = {
    "GIB": 2**30, "MIB": 2**20, "KIB": 2**10, "GB": 10**9, "MB": 10**6, "KB": 10**3, "TIB": 2**40, "TB": 10**12,
}  # fmt: skip


@cache
def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Bytes of one element; 1/8 for `torch.bool`, as quantised weights are counted.

    Args:
        dtype: A torch dtype, or one that torch does not have.
    """
    if dtype == torch.bool:
        return 1 / 8
    return CUSTOM_BYTES[dtype] if isinstance(dtype, CustomDtype) else dtype.itemsize


def convert_file_size_to_int(size: float | str) -> int:
    """The number of bytes of a size such as "5GB" or "500 MiB"; units that end in a lower-case b count bits.

    Args:
        size: A number of bytes, or a number with a unit as str.

    Raises:
        ValueError: When it is not a size.
    """
    if not isinstance(size, str):
        return int(size)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", size)
    if match and match[2].upper() in UNITS:
        bits = match[2].endswith("b") and not match[2].upper().endswith("IB")
        return int(float(match[1]) * UNITS[match[2].upper()]) // (8 if bits else 1)
    raise ValueError(f"{size!r} is not a size: use a number of bytes, or one with a unit, such as '5GB' or '200MiB'.")


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, with their names.

    Args:
        module: The module.
        include_buffers (`bool`): Yield buffers too.
        recurse (`bool`): Include those of submodules.
        remove_non_persistent (`bool`): Leave out buffers that no checkpoint holds.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
        for name, buffer in module.named_buffers(recurse=recurse):
            if name not in left_out:
                yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """The names of buffers that no checkpoint holds.

    Args:
        module: The module.
        recurse (`bool`): Include those of submodules.
        fqns (`bool`): Return fully qualified names rather than names in the own module.
    """
    if not recurse:
        return set(module._non_persistent_buffers_set)
    return {
        f"{path}.{name}" if fqns and path else name
        for path, submodule in module.named_modules()
        for name in submodule._non_persistent_buffers_set
    }


def compute_module_sizes(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of a model, of each of its modules and of each tensor.

    Args:
        model: The model, which may be on the meta device.
        dtype: Dtype to which floating-point tensors will be converted, if it is smaller than their own.
        special_dtypes: The dtypes of single tensors, by name.
        buffers_only (`bool`): Leave parameters out.

    Returns:
        Bytes by name; `""` is the model. A tensor with several names counts once. Unknown names give 0.
    """
    target = _element_size(dtype) if dtype is not None else None
    special = {name: _element_size(tensor_dtype) for name, tensor_dtype in (special_dtypes or {}).items()}
    sizes: dict[str, int] = defaultdict(int)
    seen: set[int] = set()
    paths = []
    for path, module in walk(model):
        paths.append(path)
        prefix = f"{path}." if path else ""
        for key, tensor in _own_tensors(module, buffers_only):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            name = prefix + key
            dtype_size = dtype_byte_size(tensor.dtype)
            if name in special:
                element = special[name]
            elif target is None or not (tensor.is_floating_point() or tensor.is_complex()):
                element = dtype_size
            else:
                element = min(dtype_size, target)
            sizes[name] = size = int(tensor.numel() * element)
            sizes[path] += size
    for path in reversed(paths):  # submodules come after their parents
        if path and path in sizes:
            sizes[path.rpartition(".")[0]] += sizes[path]
    return sizes


def _own_tensors(module: nn.Module, buffers_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
    if not buffers_only:
        yield from ((key, tensor) for key, tensor in module._parameters.items() if tensor is not None)
    yield from ((key, tensor) for key, tensor in module._buffers.items() if tensor is not None)


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
) -> int:
    """Bytes of all buffers; arguments as in `compute_module_sizes`."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_module_leaves(module_sizes: Sizes) -> list[str]:
    """The names that no other name has as its parent."""
    parents = {name.rpartition(".")[0] for name in module_sizes if name}
    return [name for name in module_sizes if name not in parents]


def get_max_layer_size(
    modules: Sequence[tuple[str, torch.Tensor | nn.Module]],
    module_sizes: Sizes,
    no_split_module_classes: Sequence[str] | None,
) -> tuple[int, list[str]]:
    """The largest module that cannot be split over devices.

    Args:
        modules: Where to look, with their names.
        module_sizes: Bytes by name.
        no_split_module_classes: Names of classes whose modules are not split over devices.

    Returns:
        Its bytes, and the names of all such modules of this size.
    """
    no_split = set(no_split_module_classes or ())
    largest, names = 0, []
    pending: list[tuple[str, Any]] = list(reversed(modules))
    while pending:
        name, module = pending.pop()
        children = [] if isinstance(module, torch.Tensor) else list(module.named_children())
        if children and type(module).__name__ not in no_split:
            pending.extend((f"{name}.{key}", child) for key, child in reversed(children))
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Bytes of a model, and of its largest part that cannot be split, with the names of those of that size.

    Such a part is a module, or a tensor of the model itself.
    """
    sizes = compute_module_sizes(model)
    no_split: Any = getattr(model, "_no_split_modules", None) or []
    parts: list[tuple[str, torch.Tensor | nn.Module]] = [
        *model.named_parameters(recurse=False),
        *model.named_children(),
    ]
    parts += model.named_buffers(recurse=False)
    return sizes.get("", 0), get_max_layer_size(parts, sizes, no_split)


def _element_size(dtype: str | torch.dtype) -> float:
    return dtype_byte_size(dtype if isinstance(dtype, CustomDtype) else as_dtype(dtype))
