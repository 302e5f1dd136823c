"""Adding device hooks to all modules of a model that need one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.hooks.hook import (
    add_hook_to_module,
    hooks_of,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accel_bigmodel.offload.loader import PrefixedDataset
from accel_bigmodel.sizes import named_module_tensors
from accel_bigmodel.tensors import TiedTensors

Device = int | str | torch.device
Weights = Mapping[str, torch.Tensor]


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Add a hook that moves inputs to a device to all submodules that hold weights and have no hook.

    Args:
        module: The module.
        execution_device: The device; weights are put there too.
        skip_keys: Keyword arguments that are not moved.
        preload_module_classes: Names of classes that are hooked as one; their submodules need no hook.
        tied_params_map: Copies of tied parameters, by `data_ptr()` and device.
    """
    if not hasattr(module, "_hf_hook") and len(module.state_dict()) > 0:
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Weights | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Add a hook that moves weights and inputs to a device to every module that has tensors of its own.

    Args:
        module: The module.
        execution_device: The device.
        offload (`bool`): Whether weights are offloaded between forward passes.
        weights_map: The weights by name.
        offload_buffers (`bool`): Whether buffers are offloaded too.
        module_name: The name of the module in `weights_map`.
        skip_keys: Keyword arguments that are not moved.
        preload_module_classes: Names of classes whose weights are loaded all at once, because they use those
            of submodules without calling these.
        tied_params_map: Copies of tied parameters, by `data_ptr()` and device.
    """
    at_once = offload and type(module).__name__ in (preload_module_classes or ())
    prefix = f"{module_name}." if module_name else ""
    if at_once or next(named_module_tensors(module), None) is not None:
        hook = AlignDevicesHook(
            execution_device,
            offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=at_once,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    if at_once:
        return
    for name, child in module.named_children():
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            prefix + name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Weights | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Hook a model block by block; each block has its device and may be offloaded.

    Args:
        module: The model.
        execution_device: The device of each block, by name, or of the whole model.
        offload: Whether a block's weights are offloaded, by name, or those of the whole model.
        weights_map: The weights by name.
        offload_buffers (`bool`): Whether buffers of offloaded blocks are offloaded too.
        module_name: The name of the module.
        skip_keys: Keyword arguments that are not moved.
        preload_module_classes: Names of classes whose weights are loaded all at once.
        tied_params_map: Copies of tied parameters, by `data_ptr()` and device.
    """
    shared: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            attach_align_device_hook(
                module, execution_device, True, weights_map, offload_buffers, module_name, **shared
            )
        else:
            hook = AlignDevicesHook(execution_device, io_same_device=True, place_submodules=True, **shared)
            add_hook_to_module(module, hook)
        return
    devices = execution_device if isinstance(execution_device, Mapping) else dict.fromkeys(offload, execution_device)  # type: ignore[arg-type]
    offloaded = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    blocks = _Blocks(devices, offloaded, weights_map, offload_buffers, preload_module_classes, shared)
    blocks.attach(module, module_name)


@dataclass(frozen=True)
class _Blocks:
    """The devices of a model's blocks, and what their hooks need."""

    devices: Mapping[str, Any]
    offload: Mapping[str, bool]
    weights_map: Weights | None
    offload_buffers: bool
    preload_module_classes: Sequence[str] | None
    shared: dict[str, Any]

    def attach(self, module: nn.Module, name: str) -> None:
        """Hook a module, if it is a block, and its submodules."""
        outermost = name == ""
        if name in self.devices and name in self.offload:
            (self._offload_block if self.offload[name] else self._place_block)(module, name, self.devices[name])
        elif outermost:
            hook = AlignDevicesHook(self.devices.get(""), io_same_device=True, **self.shared)
            add_hook_to_module(module, hook, append=True)
        prefix = f"{name}." if name else ""
        for key, child in module.named_children():
            self.attach(child, prefix + key)

    def _place_block(self, module: nn.Module, name: str, device: Device) -> None:
        """Hook a block whose weights stay on its device."""
        hook = AlignDevicesHook(
            device,
            offload_buffers=self.offload_buffers,
            io_same_device=name == "",
            place_submodules=True,
            **self.shared,
        )
        add_hook_to_module(module, hook)
        attach_execution_device_hook(module, device, **self.shared)

    def _offload_block(self, module: nn.Module, name: str, device: Device) -> None:
        """Hook a block whose weights are offloaded."""
        attach_align_device_hook(
            module,
            device,
            offload=True,
            weights_map=self.weights_map,
            offload_buffers=self.offload_buffers,
            module_name=name,
            preload_module_classes=self.preload_module_classes,
            **self.shared,
        )
        if not hasattr(module, "_hf_hook"):
            add_hook_to_module(module, AlignDevicesHook(device, io_same_device=name == "", **self.shared))
        attach_execution_device_hook(module, device, preload_module_classes=self.preload_module_classes, **self.shared)


def take_weights_back(model: nn.Module) -> None:
    """Remove the hooks of modules whose weights are offloaded, which get them: in CPU memory, or as views of files.

    Args:
        model: The model; nothing is read before its weights are used.
    """
    for module in model.modules():
        hooks: list[Any] = list(hooks_of(module))
        if any(getattr(hook, "offload", False) for hook in hooks) and {*map(type, hooks)} == {AlignDevicesHook}:
            remove_hook_from_module(module)


def materialize_meta_tensors(model: nn.Module, target_device: int | str | torch.device = "cpu") -> nn.Module:
    """Undo `dispatch_model`, `cpu_offload` or `disk_offload`: all weights are in the model again, which may be moved as any other.

    Args:
        model (`torch.nn.Module`): A dispatched model, or any other; changed in place.
        target_device (`int`, `str` or `torch.device`): Where to; it needs room for the full model.

    Returns:
        `model`, without hooks and device map; tied weights are tied.

    Raises:
        ValueError: A weight was on the meta device and not offloaded.

    Example:
        ```python
        model = materialize_meta_tensors(model, "cuda:0")
        ```
    """
    remove_hook_from_submodules(model)
    if empty := [name for name, tensor in chain(model.named_parameters(), model.named_buffers()) if tensor.is_meta]:
        raise ValueError(
            f"Weights of {type(model).__name__} are on the meta device, and no hook offloads them: {', '.join(empty[:5])}. Load a "
            "checkpoint first."
        )
    model.__dict__.pop("hf_device_map", None)
    return model.to(target_device)
