"""Spreading a model over devices, main memory and the disk."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accel_bigmodel.budgets import NOT_ACCELERATORS
from accel_bigmodel.device_map.check import check_device_map
from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.hooks.attach import attach_align_device_hook, attach_align_device_hook_on_blocks
from accel_bigmodel.hooks.hook import add_hook_to_module
from accel_bigmodel.offload.folder import INDEX_NAME, offload_state_dict
from accel_bigmodel.offload.loader import OffloadedWeightsLoader, extract_submodules_state_dict
from accel_bigmodel.tied import find_tied_parameters, retie_parameters
from accel_ops.nested import recursive_getattr

Device = int | str | torch.device
Weights = Mapping[str, torch.Tensor]
MOVERS = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "hpu")


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Weights | None = None,
    preload_module_classes: Sequence[str] | None = None,
) -> nn.Module:
    """Keep all weights in main memory, and bring those of each module to a device while it runs.

    Args:
        model: The model.
        execution_device: The device; that of the model's first parameter when None.
        offload_buffers (`bool`): Keep buffers in main memory too.
        state_dict: The weights; those of the model when None.
        preload_module_classes: Names of classes whose weights come all at once.

    Returns:
        The model.
    """
    if execution_device is None:
        execution_device = next(iter(model.parameters())).device
    if state_dict is None:
        state_dict = {name: tensor.to("cpu") for name, tensor in model.state_dict().items()}
    return _offload_all(model, execution_device, offload_buffers, state_dict, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
) -> nn.Module:
    """Keep all weights in a folder, and bring those of each module to a device while it runs.

    Args:
        model: The model.
        offload_dir: The folder; weights are written there unless it has an index already.
        execution_device: The device; that of the model's first parameter when None.
        offload_buffers (`bool`): Keep buffers there too.
        preload_module_classes: Names of classes whose weights come all at once.

    Returns:
        The model.
    """
    if execution_device is None:
        execution_device = next(iter(model.parameters())).device
    if not os.path.isfile(os.path.join(offload_dir, INDEX_NAME)):
        offload_state_dict(offload_dir, model.state_dict())
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _offload_all(model, execution_device, offload_buffers, weights, preload_module_classes)


def _offload_all(
    model: nn.Module,
    execution_device: Device,
    offload_buffers: bool,
    weights: Weights,
    preload_module_classes: Sequence[str] | None,
) -> nn.Module:
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device=execution_device,
        offload=True,
        weights_map=weights,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
        tied_params_map={},
    )
    return model


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Device],
    main_device: Device | None = None,
    state_dict: Weights | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Put the parts of a model on their devices, and let each find its weights and inputs there when it runs.

    Args:
        model: The model.
        device_map: The device of each part, by name: the number of an accelerator, "cpu" or "disk".
        main_device: Where parts run that are in main memory or on disk; the first accelerator of the map when None.
        state_dict: The weights of parts in main memory; those of the model when None.
        offload_dir: A folder for the weights of parts on disk.
        offload_index: Where weights on disk are already: as for `OffloadedWeightsLoader`.
        offload_buffers (`bool`): Whether buffers of parts that are not on an accelerator stay with them.
        skip_keys: Keyword arguments of forward passes that stay where they are.
        preload_module_classes: Names of classes whose weights come all at once.
        force_hooks (`bool`): Put hooks on the model even if there is one device only.

    Returns:
        The model; `hf_device_map` says what is where.

    Raises:
        ValueError: When the map does not fit the model, or weights go to disk and no folder is given.
    """
    _check(model, device_map)
    if len(set(device_map.values())) > 1 or _is_quantised(model) or force_hooks:
        _dispatch_parts(
            model, device_map, main_device, state_dict, offload_dir, offload_index, offload_buffers, skip_keys,
            preload_module_classes,
        )  # fmt: skip
    else:
        (device,) = set(device_map.values())
        if device == "disk":
            raise ValueError(
                "The device map puts the whole model on disk: use disk_offload(model, offload_dir) for that."
            )
        model.to(device)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def _check(model: nn.Module, device_map: Mapping[str, Device]) -> None:
    """Check the map, unless somebody has replaced the check under its old path, as transformers does for some models."""
    old_path = sys.modules.get("accelerate.big_modeling")
    getattr(old_path, "check_device_map", check_device_map)(model, device_map)


def _dispatch_parts(
    model: nn.Module,
    device_map: Mapping[str, Device],
    main_device: Device | None,
    state_dict: Weights | None,
    offload_dir: str | os.PathLike[str] | None,
    offload_index: Mapping[str, Any] | None,
    offload_buffers: bool,
    skip_keys: str | list[str] | None,
    preload_module_classes: Sequence[str] | None,
) -> None:
    if main_device is None:
        accelerators = [device for device in device_map.values() if device not in NOT_ACCELERATORS]
        main_device = accelerators[0] if accelerators else "cpu"
    on_disk = [name for name, device in device_map.items() if device == "disk"]
    in_memory = [name for name, device in device_map.items() if device == "cpu"] if main_device != "cpu" else []
    if on_disk and offload_dir is None and offload_index is None:
        raise ValueError(
            f"The device map puts {on_disk[:5]} on disk, but there is no folder for their weights: give offload_dir."
        )
    if state_dict is None and in_memory:
        state_dict = extract_submodules_state_dict(model.state_dict(), in_memory)
    has_index = offload_dir is not None and os.path.isfile(os.path.join(offload_dir, INDEX_NAME))
    if on_disk and offload_index is None and not has_index:
        assert offload_dir is not None
        offload_state_dict(offload_dir, extract_submodules_state_dict(model.state_dict(), on_disk))
    waiting = ("disk",) if main_device in ("cpu", "mps") else NOT_ACCELERATORS
    offload = {name: device in waiting for name, device in device_map.items()}
    devices = {name: main_device if device in NOT_ACCELERATORS else device for name, device in device_map.items()}
    weights = None
    if state_dict is not None or (on_disk and (offload_dir is not None or offload_index is not None)):
        weights = OffloadedWeightsLoader(state_dict, save_folder=offload_dir if on_disk else None, index=offload_index)
    tied = find_tied_parameters(model)
    attach_align_device_hook_on_blocks(
        model,
        execution_device=devices if "" in devices else {"": main_device, **devices},
        offload=offload,
        weights_map=weights,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        tied_params_map={
            recursive_getattr(model, name).data_ptr(): {} for group in tied for name in group if _has_data(model, name)
        },
    )
    retie_parameters(model, tied)
    _warn_when_moved(model, offloaded=any(offload.values()))


def _has_data(model: nn.Module, name: str) -> bool:
    return not recursive_getattr(model, name).is_meta


def _is_quantised(model: nn.Module) -> bool:
    """Whether bitsandbytes has quantised it: then its weights cannot be moved like others."""
    flagged = getattr(model, "is_quantized", False) or getattr(model, "is_loaded_in_8bit", False)
    method = getattr(model, "quantization_method", "bitsandbytes")
    return bool(flagged) and getattr(method, "value", method) == "bitsandbytes"


def _warn_when_moved(model: nn.Module, offloaded: bool) -> None:
    """Let methods that move a whole model say that this one is spread out."""

    def guarded(move: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(move)
        def moved(*args: Any, **kwargs: Any) -> Any:
            import logging

            logging.getLogger(__name__).warning(
                "%s is spread over devices and is being moved as a whole: what its hooks expect is then wrong.",
                type(model).__name__,
            )
            if offloaded and any(parameter.is_meta for parameter in model.parameters()):
                raise RuntimeError(
                    f"{type(model).__name__} has weights in main memory or on disk and cannot be moved as a whole: make "
                    "another device map, or remove its hooks first (remove_hook_from_submodules)."
                )
            return move(*args, **kwargs)

        return moved

    for name in MOVERS:
        if hasattr(model, name):
            setattr(model, name, guarded(getattr(model, name)))
