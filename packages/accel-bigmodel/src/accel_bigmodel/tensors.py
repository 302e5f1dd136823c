"""Moving one parameter or buffer of a model to a device, or giving it another value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accel_bigmodel.dtypes import as_dtype
from accel_bigmodel.hooks.hook import hooks_of
from accel_bigmodel.hooks.offloaded import OffloadedTensor
from accel_state.devices import resolve_device

Device = int | str | torch.device
TiedTensors = MutableMapping[int, MutableMapping[Any, torch.Tensor]]


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedTensors | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move a parameter or buffer to a device, with its own value or with another one.

    Args:
        module: The module that has it, or a parent of that.
        tensor_name: The name of the tensor, qualified from `module`.
        device: The target device.
        value: The new value, of the same shape; required for a tensor on the meta device.
        dtype: Dtype of the result, if a floating-point value is given or the device is meta; that of the tensor when None.
        fp16_statistics: Scales of an 8-bit weight of bitsandbytes.
        tied_params_map: Tensors that are on devices already, by `data_ptr()` of the value and by device: several names of
            one parameter share one copy.
        non_blocking (`bool`): Let the copy overlap with other work.
        clear_cache (`bool`): Not used, because nothing is freed here that stays in a device's cache.

    Raises:
        ValueError: When there is no such tensor, it is on the meta device and no value is given, or shapes differ.
    """
    *path, name = tensor_name.split(".")
    for part in path:
        module = getattr(module, part)
    old = _existing(module, name)
    if isinstance(old, OffloadedTensor):
        old = old.ordinary()
    if value is None and old.device.type == "meta" and not _is_meta(device):
        raise ValueError(
            f"{tensor_name!r} is on the meta device and has no data: pass the value that it is to have on {device}."
        )
    if value is not None:
        value = _checked(value, old, tensor_name, dtype)
    elif dtype is not None and _is_meta(device):  # without data, the dtype can change
        value = _checked(old, old, tensor_name, dtype)
    shared = _shared(value if value is not None else old, device, tied_params_map)
    if shared is None:
        tensor = _moved(old, value, device, non_blocking)
        _remember(value if value is not None else old, tensor, device, tied_params_map)
    else:
        tensor = shared
    if fp16_statistics is not None:
        tensor.SCB = fp16_statistics.to(tensor.device)  # type: ignore[attr-defined]
    _put(module, name, tensor)


def _existing(module: nn.Module, name: str) -> torch.Tensor:
    for tensors in (module._parameters, module._buffers):
        tensor = tensors.get(name)
        if tensor is not None:
            return tensor
    has = sorted([*module._parameters, *module._buffers])
    raise ValueError(f"{type(module).__name__} has no parameter or buffer {name!r}: it has {has}.")


def _checked(value: torch.Tensor, old: torch.Tensor, name: str, dtype: str | torch.dtype | None) -> torch.Tensor:
    """The value in its final dtype: that of the old one, as torch loads it, or the one given, which is for real numbers."""
    if value.shape != old.shape and not is_quantised(old):
        raise ValueError(
            f"{name!r} has shape {tuple(old.shape)}, but the value has {tuple(value.shape)}: it belongs to another "
            "model, or to another configuration of this one."
        )
    if dtype is None:
        return value if is_quantised(old) else value.to(old.dtype)
    if not (value.is_floating_point() or value.is_complex()):
        return value
    return value.to(as_dtype(dtype))


def _moved(old: torch.Tensor, value: torch.Tensor | None, device: Device, non_blocking: bool) -> torch.Tensor:
    source = old if value is None else value
    with torch.no_grad():
        moved = source.detach().to(device, non_blocking=non_blocking)
    if not isinstance(old, nn.Parameter):
        return moved
    if value is None and moved.device == old.device and moved.data_ptr() == old.data_ptr():
        return old
    kind: Any = type(old)
    if kind is nn.Parameter or not is_quantised(old):
        parameter = nn.Parameter(moved, requires_grad=old.requires_grad)
        return parameter if kind is nn.Parameter else _like(parameter, old)
    return kind(moved, requires_grad=old.requires_grad, **old.__dict__).to(device)


def _like(parameter: nn.Parameter, old: nn.Parameter) -> nn.Parameter:
    """A parameter of the same class as another, with its attributes, if the class can be made from a tensor."""
    kind: Any = type(old)
    try:
        new_parameter: nn.Parameter = kind(parameter.data, requires_grad=old.requires_grad)
    except TypeError:
        return parameter
    new_parameter.__dict__.update(old.__dict__)
    return new_parameter


def is_quantised(tensor: object) -> bool:
    """Whether it is a parameter of bitsandbytes, whose shape is that of its packed values."""
    return type(tensor).__name__ in ("Int8Params", "FP4Params", "Params4bit")


def _put(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    tensors: Any = module._parameters if name in module._parameters else module._buffers
    if tensors[name] is not tensor:
        tensors[name] = tensor


def _is_meta(device: Device) -> bool:
    return not isinstance(device, int) and torch.device(device).type == "meta"


def _shared(source: torch.Tensor, device: Device, tied: TiedTensors | None) -> torch.Tensor | None:
    if tied is None or source.device.type == "meta":
        return None
    return tied_copy_on(device, tied.get(source.data_ptr(), {}))


def tied_copy_on(device: Device, copies: Mapping[Any, torch.Tensor]) -> torch.Tensor | None:
    """The copy of a tied tensor on a device, whichever of its names is the key: `0`, "cuda" or "cuda:0"."""
    if not copies:
        return None
    resolved = resolve_device(device)
    return next((tensor for name, tensor in copies.items() if resolve_device(name) == resolved), None)


def _remember(source: torch.Tensor, tensor: torch.Tensor, device: Device, tied: TiedTensors | None) -> None:
    if tied is not None and source.device.type != "meta" and not _is_meta(device) and source.data_ptr() in tied:
        tied[source.data_ptr()][device] = tensor


@contextmanager
def align_module_device(module: nn.Module, execution_device: torch.device | None = None) -> Iterator[None]:
    """A context in which the module's own parameters are on a device, offloaded ones included.

    Args:
        module: The module.
        execution_device: The device; when None, the one on which the module runs.
    """
    offloading: list[Any] = [hook for hook in hooks_of(module) if getattr(hook, "offload", False)]
    if offloading:
        devices = [hook.execution_device for hook in offloading]
        try:
            for hook in offloading:
                hook.execution_device = execution_device if execution_device is not None else hook.execution_device
                hook.pre_forward(module)
            yield
        finally:
            for hook, device in zip(offloading, devices, strict=True):
                hook.post_forward(module, None)
                hook.execution_device = device
        return
    if execution_device is None:
        yield
        return
    originals = dict(module.named_parameters(recurse=False))
    try:
        for name in originals:
            set_module_tensor_to_device(module, name, execution_device)
        yield
    finally:
        for name, original in originals.items():
            moved = module._parameters[name]
            if moved is not None and moved is not original and not moved.is_meta and not original.is_meta:
                original.data.copy_(moved.data)  # what was written to it meanwhile
            module._parameters[name] = original
