"""How much memory each device may give to a model."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from accel_bigmodel.sizes import compute_module_sizes, convert_file_size_to_int, get_module_leaves
from accel_state.devices import detect_device_kind

logger = logging.getLogger("accelerate.utils.modeling")

Device = int | str | torch.device
NOT_ACCELERATORS = ("cpu", "disk")
ROOM_FOR_UNEVEN_SPLITS = 1.25


def get_max_memory(max_memory: Mapping[Device, float | str] | None = None) -> dict[Device, int]:
    """The bytes that may be used on each device, in the order in which they are filled.

    Args:
        max_memory: Bytes, or sizes such as "10GB", by device: the number of an accelerator, "mps", "cpu" or "disk"; an
            infinite number of bytes is no limit. Sizes given as str are replaced in place by their bytes, on which
            transformers relies. When None, what is free now on all accelerators and in CPU memory. Memory that an integrated
            GPU shares with the CPU counts once, for the GPU: "cpu" is missing where all GPUs are integrated, and beside
            other GPUs it is what the integrated ones leave.

    Raises:
        TypeError: It is not a mapping.
        ValueError: For a device that can hold no weights, or a value that is not a size.
    """
    if max_memory is None:
        return _free_memory()
    if not isinstance(max_memory, Mapping):
        raise TypeError(
            f"max_memory={max_memory!r} is not a mapping from devices to sizes: pass for example {{0: '10GB', 'cpu': '30GB'}}."
        )
    sizes = {device: _limit(device, size) for device, size in max_memory.items()}
    numbers = sorted(device for device in sizes if isinstance(device, int) and device >= 0)
    devices: list[Device] = [*numbers, *(name for name in ("mps", *NOT_ACCELERATORS) if name in sizes)]
    unknown = [device for device in sizes if device not in devices]
    if unknown:
        raise ValueError(
            f"max_memory has the unknown device {unknown[0]!r}: use the index of an accelerator, 'mps', 'cpu' or 'disk'."
        )
    if isinstance(max_memory, MutableMapping):
        max_memory.update({device: sizes[device] for device, size in max_memory.items() if isinstance(size, str)})
    kind = detect_device_kind()
    present = kind.device_count() if kind.name not in ("cpu", "mps") else 0
    for number in numbers:
        if number >= present:
            logger.warning("max_memory names device %d, but this machine has %d accelerators.", number, present)
    return {device: sizes[device] for device in devices}


def _limit(device: Device, size: Any) -> int:
    """The bytes of one entry; infinity is returned unchanged."""
    try:
        if size == math.inf:
            return size
        num_bytes = convert_file_size_to_int(size)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"max_memory gives {device!r} the size {size!r}: give a number of bytes, or one with a unit, such as '5GB'."
        ) from error
    if num_bytes < 0:
        raise ValueError(f"max_memory gives {device!r} a negative size, {size!r}: use 0 to leave a device out.")
    return num_bytes


def _free_memory() -> dict[Device, int]:
    """What is free on each device now; memory that a GPU shares with the CPU counts once, for the GPU.

    Where all GPUs are integrated, no "cpu" is given, as in accelerate 1.15. On a machine that also has GPUs with memory of
    their own, people expect "cpu", for what does not fit there: it is what the integrated ones do not count already.
    """
    import psutil

    cpu_memory = psutil.virtual_memory().available
    kind = detect_device_kind()
    if kind.name == "cpu":
        return {"cpu": cpu_memory}
    if kind.name == "mps":  # which uses CPU memory
        return {"mps": cpu_memory}
    module: Any = kind.module()
    free: dict[Device, int] = {}
    integrated: list[int] = []
    for number in range(kind.device_count()):
        try:
            torch.zeros((), device=torch.device(kind.name, number))  # the runtime itself takes memory, on first use
            free[number] = module.mem_get_info(number)[0]
            if _shares_cpu_memory(module, number):
                integrated.append(number)
        except RuntimeError as error:  # full, or another process has it for itself
            logger.warning("%s:%d is left out of the device map: %s", kind.name, number, error)
    if integrated and len(integrated) == len(free):
        return free
    return {**free, "cpu": max(0, cpu_memory - max((free[number] for number in integrated), default=0))}


def _shares_cpu_memory(module: Any, number: int) -> bool:
    """Whether a GPU has no memory of its own, so that CPU memory would count twice."""
    properties = getattr(module, "get_device_properties", None)
    return properties is not None and bool(getattr(properties(number), "is_integrated", False))


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Device, float | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    low_zero: bool = False,
) -> dict[Device, int]:
    """Limits that spread a model evenly over the accelerators.

    Args:
        model: The model, which may be on the meta device.
        max_memory: As for `get_max_memory`.
        no_split_module_classes: Names of classes whose modules are not split over devices.
        dtype: As for `compute_module_sizes`.
        special_dtypes: As for `compute_module_sizes`.
        low_zero (`bool`): Put as little as possible on the first accelerator, which needs memory for other work.

    Returns:
        Bytes by device. The last accelerator keeps its own limit, because modules never split quite evenly.
    """
    limits = get_max_memory(max_memory)
    accelerators = [device for device, size in limits.items() if device not in NOT_ACCELERATORS and size > 0]
    if len(accelerators) < 2:
        return limits
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    per_device = sizes.get("", 0) // (len(accelerators) - low_zero)
    per_device += int(
        ROOM_FOR_UNEVEN_SPLITS * max(_largest_of(model, sizes, no_split_module_classes), _mean_module(sizes))
    )
    *first, last = accelerators
    for device in first:
        limits[device] = min(per_device, limits[device])
    if low_zero:
        on_others = sum(limits[device] for device in accelerators[1:])
        limits[accelerators[0]] = min(max(0, sizes.get("", 0) - on_others), limits[accelerators[0]])
    return limits


def _largest_of(model: nn.Module, sizes: Mapping[str, int], classes: Sequence[str] | str | None) -> int:
    """The bytes of the largest module of these classes."""
    class_names = {classes} if isinstance(classes, str) else set(classes or ())
    module_sizes = (
        sizes.get(name, 0) for name, module in model.named_modules() if type(module).__name__ in class_names
    )
    return max(module_sizes, default=0)


def _mean_module(sizes: Mapping[str, int]) -> int:
    """The mean bytes of the innermost modules, which hold tensors and no modules."""
    tensors = set(get_module_leaves(sizes))
    modules = {name: size for name, size in sizes.items() if name not in tensors}
    innermost = get_module_leaves(modules)
    return sum(modules[name] for name in innermost) // max(len(innermost), 1)
