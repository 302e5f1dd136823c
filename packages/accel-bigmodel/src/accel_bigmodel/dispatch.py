"""Dispatching the modules of a model over devices, CPU memory and the disk."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel_bigmodel.budgets import NOT_ACCELERATORS, get_balanced_memory
from accel_bigmodel.device_map.check import bytes_to_move, check_device_map, check_memory, check_places
from accel_bigmodel.device_map.plan import infer_auto_device_map
from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.hooks.attach import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    take_weights_back,
)
from accel_bigmodel.hooks.hook import add_hook_to_module
from accel_bigmodel.model_methods import warn_when_moved
from accel_bigmodel.offload.folder import INDEX_NAME, offload_state_dict, read_index
from accel_bigmodel.offload.loader import (
    OffloadedWeightsLoader,
    check_weights_are_stored,
    extract_submodules_state_dict,
)
from accel_bigmodel.replaceable import look_up
from accel_bigmodel.sizes import compute_module_sizes
from accel_bigmodel.streaming.settings import Streaming
from accel_bigmodel.streaming.start import start_streaming
from accel_ops.nested import recursive_getattr
from accel_ops.tied import find_tied_parameters, retie_parameters
from accel_state.devices import default_device

Device = int | str | torch.device
Weights = Mapping[str, torch.Tensor]
WAYS_TO_PLACE = ("auto", "balanced", "balanced_low_0", "sequential")


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Weights | None = None,
    preload_module_classes: Sequence[str] | None = None,
    streaming: Streaming | None = None,
) -> nn.Module:
    """Offload all weights to CPU memory, and copy those of each module to a device for its forward pass.

    Args:
        model: The model.
        execution_device: The device; that of the model's first parameter when None.
        offload_buffers (`bool`): Offload buffers too.
        state_dict: The weights by name, on any device; those of the model when None.
        preload_module_classes: Names of classes whose modules get all their weights at once, those of submodules included.
        streaming: How many blocks of weights are prefetched, and the device memory that may take.

    Returns:
        The model; `offload_report()` shows how long each module waits for its weights.
    """
    if execution_device is None:
        execution_device = next(iter(model.parameters())).device
    weights = model.state_dict() if state_dict is None else state_dict
    state_dict = {name: tensor.to("cpu") for name, tensor in weights.items()}
    return _offload_all(model, execution_device, offload_buffers, state_dict, preload_module_classes, streaming)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
    streaming: Streaming | None = None,
) -> nn.Module:
    """Offload all weights to a folder, and copy those of each module to a device for its forward pass.

    Args:
        model: The model.
        offload_dir: The folder; weights are written there unless it has an index already. For a model on the meta device
            (`init_empty_weights`), a safetensors checkpoint of it, whose files are memory-mapped and not copied.
        execution_device: The device; that of the model's first parameter when None, or the default one of this machine
            for a model on the meta device.
        offload_buffers (`bool`): Offload buffers too.
        preload_module_classes: Names of classes whose modules get all their weights at once, those of submodules included.
        streaming: How many blocks of weights are prefetched, and the device memory that may take.

    Returns:
        The model; `offload_report()` shows how long each module waits for its weights.
    """
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    if execution_device is None:
        execution_device = default_device() if is_empty else next(iter(model.parameters())).device
    if os.path.isfile(os.path.join(offload_dir, INDEX_NAME)):
        weights = OffloadedWeightsLoader(save_folder=offload_dir)
        check_weights_are_stored(model, weights, offload_dir)
    elif is_empty:
        from accel_bigmodel.weights.load import load_checkpoint_in_model

        everywhere = {"": "disk"}  # buffers that are not offloaded are loaded
        index = load_checkpoint_in_model(
            model, offload_dir, device_map=everywhere, offload_buffers=offload_buffers, strict=True
        )
        weights = OffloadedWeightsLoader(index=index)
    else:
        offload_state_dict(offload_dir, model.state_dict())
        weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _offload_all(model, execution_device, offload_buffers, weights, preload_module_classes, streaming)


def _offload_all(
    model: nn.Module,
    execution_device: Device,
    offload_buffers: bool,
    weights: Weights,
    preload_module_classes: Sequence[str] | None,
    streaming: Streaming | None,
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
    start_streaming(model, streaming)
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
    streaming: Streaming | None = None,
    strict: bool = False,
) -> nn.Module:
    """Put the modules of a model on their devices, with hooks that move weights and inputs there for the forward pass.

    Args:
        model: The model.
        device_map: Device by module name: the index of an accelerator, "cpu" or "disk".
        main_device: Where modules that are offloaded to CPU memory or disk run; the first accelerator of the map when None.
        state_dict: The weights of modules in CPU memory, by name; those of the model when None.
        offload_dir: A folder for the weights of modules on disk.
        offload_index: Where weights on disk are already: as for `OffloadedWeightsLoader`.
        offload_buffers (`bool`): Whether buffers of offloaded modules are offloaded too.
        skip_keys: Keyword arguments of forward passes that are not moved to another device.
        preload_module_classes: Names of classes whose modules get all their weights at once, those of submodules included.
        force_hooks (`bool`): Add hooks to the model even if the map has one device only.
        streaming: How many blocks of offloaded weights are prefetched, and the device memory that may take; by default
            as much as the largest offloaded module, which is what `infer_auto_device_map` leaves free.
        strict (`bool`): Raise an error for a map that names modules which the model does not have, instead of a warning.

    Returns:
        The model; its `hf_device_map` is the map, and `offload_report()` shows how long each module waits for its weights.

    Raises:
        ValueError: When the map does not match the model, or weights go to disk and no folder is given.
    """
    check_places(device_map)
    # transformers replaces the check for some models
    check = look_up("check_device_map", check_device_map)
    check(model, device_map, **({"strict": True} if strict else {}))
    take_weights_back(model)
    dispatch = _Dispatch(
        device_map, main_device, state_dict, offload_dir, offload_index, offload_buffers, skip_keys,
        preload_module_classes, streaming,
    )  # fmt: skip
    return dispatch.apply(model, force_hooks)


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | Mapping[str, Device] | None = None,
    max_memory: Mapping[Device, float | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    streaming: Streaming | None = None,
) -> nn.Module:
    """Load a checkpoint into a model, on the meta device or not, and put its modules on their devices.

    Args:
        model: The model.
        checkpoint: A weights file, an index, a folder with either, or the name of a repository on the Hub.
        device_map: Device by module name, or how to choose it: "auto" and "balanced" spread the model evenly over the
            accelerators, "balanced_low_0" leaves the first one as free as possible, "sequential" fills one after the
            other. When None, weights are loaded and nothing is placed.
        max_memory: As for `get_max_memory`.
        no_split_module_classes: Names of classes whose modules are not split over devices.
        offload_folder: A folder for offloaded weights that no safetensors file holds in the wanted dtype.
        offload_buffers (`bool`): As for `dispatch_model`.
        dtype: Dtype to which floating-point weights are converted while they are loaded.
        offload_state_dict (`bool`, *optional*): Without effect on the result.
        skip_keys: As for `dispatch_model`.
        preload_module_classes: As for `dispatch_model`.
        force_hooks (`bool`): As for `dispatch_model`.
        strict (`bool`): Raise an error if the checkpoint's names are not the model's.
        full_state_dict (`bool`): As for `load_checkpoint_in_model`.
        broadcast_from_rank0 (`bool`): As for `load_checkpoint_in_model`.
        streaming: As for `dispatch_model`.

    Returns:
        The model.

    Raises:
        ValueError: For an unknown `device_map`, or a checkpoint that is damaged or does not match the model.

    Example:
        ```py
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config)
        model = load_checkpoint_and_dispatch(model, folder, device_map="auto")
        ```
    """
    from accel_bigmodel.weights.load import load_checkpoint_in_model

    if isinstance(device_map, str):
        device_map = _chosen_map(model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers)
    index = load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_state_dict=bool(offload_state_dict),
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if device_map is None:
        return model
    if index and set(device_map.values()) == {"disk"}:
        weights = OffloadedWeightsLoader(index=index, save_folder=offload_folder)
        _offload_all(model, default_device(), offload_buffers, weights, preload_module_classes, streaming)
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
        return model
    # Loading has checked the map.
    take_weights_back(model)
    dispatch = _Dispatch(
        device_map,
        offload_dir=offload_folder,
        offload_index=index or None,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        streaming=streaming,
    )
    return dispatch.apply(model, force_hooks)


def _chosen_map(
    model: nn.Module,
    how: str,
    max_memory: Mapping[Device, float | str] | None,
    no_split_module_classes: Sequence[str] | None,
    dtype: str | torch.dtype | None,
    offload_buffers: bool,
) -> Mapping[str, Device]:
    if how not in WAYS_TO_PLACE:
        raise ValueError(
            f"device_map={how!r} is unknown: give a mapping, or one of {', '.join(WAYS_TO_PLACE)}. To put the whole model "
            "on one device, pass {'': device}."
        )
    if how != "sequential":
        max_memory = get_balanced_memory(
            model, max_memory, no_split_module_classes, dtype, low_zero=how == "balanced_low_0"
        )
    return infer_auto_device_map(model, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers)


@dataclass(frozen=True)
class _Dispatch:
    """How the modules of a model are placed; the attributes are the arguments of `dispatch_model`."""

    device_map: Mapping[str, Device]
    main_device: Device | None = None
    state_dict: Weights | None = None
    offload_dir: str | os.PathLike[str] | None = None
    offload_index: Mapping[str, Any] | None = None
    offload_buffers: bool = False
    skip_keys: str | list[str] | None = None
    preload_module_classes: Sequence[str] | None = None
    streaming: Streaming | None = None

    def apply(self, model: nn.Module, force_hooks: bool) -> nn.Module:
        """Place the modules of a model by a map that was checked; see `dispatch_model`."""
        devices = set(self.device_map.values())
        if len(devices) > 1 or "disk" in devices or _is_quantised(model) or force_hooks:
            self._attach_hooks(model)
        else:
            (device,) = devices
            check_memory(bytes_to_move(model, self.device_map))
            model.to(device)
            start_streaming(model)  # nothing is offloaded, but the model gets its `offload_report`
        model.hf_device_map = dict(self.device_map)  # type: ignore[assignment]
        return model

    def _attach_hooks(self, model: nn.Module) -> None:
        """Attach a hook to each module of the map, which brings its weights and inputs to its device."""
        main_device = self._main_device()
        offloaded_to = _offloaded_places(main_device)
        offload = {name: device in offloaded_to for name, device in self.device_map.items()}
        devices = {
            name: main_device if device in NOT_ACCELERATORS else device for name, device in self.device_map.items()
        }
        on_disk = [name for name, device in self.device_map.items() if device == "disk"]
        if on_disk and self.offload_dir is None and self.offload_index is None:
            raise ValueError(
                f"The device map offloads {on_disk[:5]} to disk, but there is no folder for their weights: pass offload_dir."
            )
        check_memory(bytes_to_move(model, {name: device for name, device in devices.items() if not offload[name]}))
        in_memory = [name for name, is_offloaded in offload.items() if is_offloaded and name not in on_disk]
        weights = self._offloaded_weights(model, in_memory, on_disk)
        tied = find_tied_parameters(model)
        tied_tensors = (recursive_getattr(model, name) for group in tied for name in group)
        attach_align_device_hook_on_blocks(
            model,
            execution_device=devices if "" in devices else {"": main_device, **devices},
            offload=offload,
            weights_map=weights,
            offload_buffers=self.offload_buffers,
            skip_keys=self.skip_keys,
            preload_module_classes=self.preload_module_classes,
            tied_params_map={tensor.data_ptr(): {} for tensor in tied_tensors if not tensor.is_meta},
        )
        retie_parameters(model, tied)
        start_streaming(model, self.streaming or Streaming(budget=_largest_part(model, offload)))
        warn_when_moved(model, offloaded=any(offload.values()))

    def _main_device(self) -> Device:
        """The device on which offloaded modules run."""
        accelerators = (device for device in self.device_map.values() if device not in NOT_ACCELERATORS)
        return next(accelerators, "cpu") if self.main_device is None else self.main_device

    def _offloaded_weights(
        self, model: nn.Module, in_memory: Sequence[str], on_disk: Sequence[str]
    ) -> OffloadedWeightsLoader | None:
        """The weights of offloaded modules by name; those that go to disk are written unless they are there.

        Args:
            model: The model.
            in_memory: Names of the modules that are offloaded to CPU memory.
            on_disk: Names of those that are offloaded to disk.
        """
        state_dict, folder = self.state_dict, self.offload_dir if on_disk else None
        if state_dict is None and in_memory:
            state_dict = extract_submodules_state_dict(model.state_dict(), list(in_memory))
        if folder is not None and self.offload_index is None:
            if os.path.isfile(os.path.join(folder, INDEX_NAME)):
                check_weights_are_stored(model, {*read_index(folder), *(state_dict or ())}, folder, on_disk)
            else:
                offload_state_dict(folder, extract_submodules_state_dict(model.state_dict(), list(on_disk)))
        if state_dict is None and not on_disk:
            return None
        return OffloadedWeightsLoader(state_dict, save_folder=folder, index=self.offload_index)


def _offloaded_places(main_device: Device) -> tuple[str, ...]:
    """The places in a device map whose modules are offloaded; only the disk where the main device uses CPU memory itself."""
    return ("disk",) if torch.device(main_device).type in ("cpu", "mps") else NOT_ACCELERATORS


def _largest_part(model: nn.Module, offload: Mapping[str, bool]) -> int | None:
    """The bytes of the largest offloaded module."""
    sizes = compute_module_sizes(model)
    return (
        max((sizes[name] for name, is_offloaded in offload.items() if is_offloaded and name in sizes), default=None)
        or None
    )


def _is_quantised(model: nn.Module) -> bool:
    """Whether bitsandbytes has quantised the model: then its weights cannot be moved like others."""
    flagged = getattr(model, "is_quantized", False) or getattr(model, "is_loaded_in_8bit", False)
    method = getattr(model, "quantization_method", "bitsandbytes")
    return bool(flagged) and getattr(method, "value", method) == "bitsandbytes"
