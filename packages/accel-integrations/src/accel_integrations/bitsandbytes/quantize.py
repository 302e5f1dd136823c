"""Loading a checkpoint and quantizing it with bitsandbytes, layer by layer, while it is placed on its devices."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from accel_bigmodel.budgets import get_balanced_memory
from accel_bigmodel.device_map.check import check_device_map
from accel_bigmodel.device_map.plan import infer_auto_device_map
from accel_bigmodel.dispatch import WAYS_TO_PLACE, dispatch_model
from accel_bigmodel.offload.folder import Index, offload_weight, save_offload_index
from accel_bigmodel.tensors import set_module_tensor_to_device
from accel_bigmodel.weights.contents import CheckpointContents
from accel_bigmodel.weights.index import find_checkpoint
from accel_bigmodel.weights.load import load_checkpoint_in_model
from accel_bigmodel.weights.placing import device_of, scales_name
from accel_integrations.bitsandbytes.layers import (
    get_keys_to_not_convert,
    is_among,
    library,
    quantized_layers,
    replace_with_bnb_layers,
)
from accel_integrations.bitsandbytes.settings import BnbQuantizationConfig
from accel_ops.files.durable import make_folder
from accel_ops.tied import find_tied_parameters, retie_parameters
from accel_state.devices import default_device

CPU = torch.device("cpu")
FOUR_BIT_MARK = ".quant_state.bitsandbytes__"  # in names under which bitsandbytes saves 4-bit weights

logger = logging.getLogger("accelerate.utils.bnb")

Device = int | str | torch.device
StrPath = str | os.PathLike[str]


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: StrPath | None = None,
    device_map: str | Mapping[str, Device] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Mapping[Device, float | str] | None = None,
    offload_folder: StrPath | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Load a checkpoint into a model, and quantize its linear layers to 8 or 4 bits with bitsandbytes.

    The checkpoint is memory-mapped, and layers are read, quantized and moved to their device one by one, so the model
    never needs the memory of its original size. CPUs are supported.

    Args:
        model: The model, built in `init_empty_weights`; or with weights, which are quantized where they are.
        bnb_quantization_config (`BnbQuantizationConfig`): The number of bits, and the modules that are not quantized.
        weights_location: A weights file, an index of shards, a folder that holds one of these, or the name of a
            repository of the Hugging Face Hub; also one that was saved in 8 bits. Required for a model on the meta
            device.
        device_map: The device of each module, by name, or "auto", "balanced", "balanced_low_0" or "sequential". The first
            accelerator of this machine, or the CPU, when None.
        no_split_module_classes: Names of module classes that are placed on one device each.
        max_memory: As for `get_max_memory`.
        offload_folder: A folder for weights that the map offloads to disk.
        offload_state_dict (`bool`): Not used: no state dict is ever held in memory.

    Returns:
        The model, in evaluation mode, ready to run.

    Raises:
        MissingLibraryError: When bitsandbytes is not installed.
        ValueError: When there are no weights, or the map, the checkpoint and the model do not fit together.

    Example:
        ```py
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config)
        settings = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bf16")
        model = load_and_quantize_model(model, settings, weights_location="my_model", device_map="auto")
        ```
    """
    library("load_and_quantize_model()")
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    if is_empty and weights_location is None:
        raise ValueError(
            f"{type(model).__name__} has no weights: its parameters are on the meta device. Pass weights_location."
        )
    config = bnb_quantization_config
    if config.skip_modules is None:
        config = replace(config, skip_modules=get_keys_to_not_convert(model))
    places = get_quantized_model_device_map(model, config, device_map, max_memory, no_split_module_classes)
    check_device_map(model, places)
    _check_folder(places, offload_folder)
    if weights_location is not None and _is_saved_in_8_bits(weights_location):
        index = _load_quantized(model, config, weights_location, places, offload_folder)
    else:
        if weights_location is not None:
            load_checkpoint_in_model(model, weights_location)  # as views of the mapped files
        replace_with_bnb_layers(model, config, _left_alone(config))
        index = _quantize_and_place(model, config, places, offload_folder)
    model.eval()
    model.is_loaded_in_8bit = config.load_in_8bit  # type: ignore[assignment]
    model.is_loaded_in_4bit = config.load_in_4bit  # type: ignore[assignment]
    dispatch_model(model, places, offload_dir=offload_folder, offload_index=index or None)
    _free_statistics_after_use(model, places)
    return model


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: str | Mapping[str, Device] | None = None,
    max_memory: Mapping[Device, float | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
) -> dict[str, Device]:
    """The device map of a model, planned with the sizes that its modules have once they are quantized.

    Args:
        model: The model, not quantized yet.
        bnb_quantization_config: The number of bits, and the modules that are not quantized.
        device_map: The map, or how to plan it; everything on one device when None.
        max_memory: As for `get_max_memory`.
        no_split_module_classes: Names of module classes that are placed on one device each.

    Returns:
        The device of each module, by name.

    Raises:
        ValueError: For an unknown `device_map` str, or when modules with 4-bit weights would have to be offloaded.
    """
    config = bnb_quantization_config
    if device_map is None:
        device = default_device()
        return {"": device.type if device.index is None else device.index}
    places: Mapping[str, Device]
    if isinstance(device_map, str):
        places = _chosen_map(model, config, device_map, max_memory, no_split_module_classes)
    else:
        places = device_map
    if config.load_in_4bit:
        _check_not_offloaded(model, config, places)
    return dict(places)


def _chosen_map(
    model: nn.Module,
    config: BnbQuantizationConfig,
    how: str,
    max_memory: Mapping[Device, float | str] | None,
    no_split_module_classes: Sequence[str] | None,
) -> Mapping[str, Device]:
    if how not in WAYS_TO_PLACE:
        raise ValueError(
            f"device_map={how!r} is not valid. Pass a dict from module names to devices, or one of "
            f"{', '.join(WAYS_TO_PLACE)}."
        )
    special: dict[str, Any] = {
        name: torch.float32 if is_among(name, config.keep_in_fp32_modules or ()) else config.torch_dtype
        for name, _ in model.named_parameters()
        if not _is_quantized_weight(model, name, config)
    }
    target: Any = config.target_dtype
    if how != "sequential":
        low_zero = how == "balanced_low_0"
        max_memory = get_balanced_memory(model, max_memory, no_split_module_classes, target, special, low_zero)
    return infer_auto_device_map(model, max_memory, no_split_module_classes, target, special)


def _is_quantized_weight(model: nn.Module, name: str, config: BnbQuantizationConfig) -> bool:
    owner, _, leaf = name.rpartition(".")
    is_linear = type(model.get_submodule(owner)) is nn.Linear and leaf == "weight"
    return is_linear and not is_among(owner, _left_alone(config))


def _left_alone(config: BnbQuantizationConfig) -> list[str]:
    return [*(config.skip_modules or ()), *(config.keep_in_fp32_modules or ())]


# ---- what may be offloaded ----------------------------------------------------------------------------------------


def _is_offloaded(place: Any, places: Mapping[str, Device]) -> bool:
    """Whether a module with this place is offloaded: its weights are moved to another device for the forward pass."""
    in_memory = ("cpu", CPU)
    has_accelerator = any(each != "disk" and each not in in_memory for each in places.values())
    return place == "disk" or (has_accelerator and place in in_memory)


def _check_not_offloaded(model: nn.Module, config: BnbQuantizationConfig, places: Mapping[str, Device]) -> None:
    for name, _ in model.named_parameters():
        place = device_of(name, places)
        if _is_offloaded(place, places) and _is_quantized_weight(model, name, config):
            raise ValueError(
                f"The device map puts {name!r} on {str(place)!r}, but 4-bit weights cannot be offloaded. Raise "
                "max_memory of the accelerators, add the module to skip_modules, or use load_in_8bit=True."
            )


def _check_folder(places: Mapping[str, Device], folder: StrPath | None) -> None:
    if folder is None and "disk" in places.values():
        names = [name for name, place in places.items() if place == "disk"]
        raise ValueError(f"The device map offloads {names[:5]} to disk. Pass an offload_folder.")


# ---- loading --------------------------------------------------------------------------------------------------------


def _is_saved_in_8_bits(location: StrPath) -> bool:
    contents = CheckpointContents(find_checkpoint(location))
    names = list(contents)
    for name in names:
        if FOUR_BIT_MARK in name:
            raise ValueError(
                f"The checkpoint {contents.source} holds 4-bit weights of bitsandbytes, which cannot be loaded here. "
                "Pass the original weights: they are quantized while they load."
            )
    return any(scales_name(name) in contents for name in names if name.endswith("weight"))


def _load_quantized(
    model: nn.Module,
    config: BnbQuantizationConfig,
    location: StrPath,
    places: Mapping[str, Device],
    folder: StrPath | None,
) -> Index:
    """Load a checkpoint whose weights are in 8 bits already."""
    if config.load_in_4bit:
        raise ValueError(
            f"The weights in {os.fspath(location)!r} are quantized to 8 bits, so they cannot be loaded with "
            "load_in_4bit=True."
        )
    replace_with_bnb_layers(model, config, _left_alone(config))
    return load_checkpoint_in_model(
        model,
        location,
        device_map=places,
        offload_folder=folder,
        dtype=config.torch_dtype,
        keep_in_fp32_modules=config.keep_in_fp32_modules,
        offload_8bit_bnb=True,
    )


def _quantize_and_place(
    model: nn.Module, config: BnbQuantizationConfig, places: Mapping[str, Device], folder: StrPath | None
) -> Index:
    """Quantize or cast each tensor and put it on its device, one after the other."""
    index: Index = {}
    if folder is not None:
        make_folder(folder)
    tied = find_tied_parameters(model)
    quantized = {f"{name}.weight" for name in quantized_layers(model)}
    parameters = list(model.named_parameters())
    for name, parameter in parameters:
        place = device_of(name, places)
        if place == "disk" and name in quantized:
            assert folder is not None
            quantize_and_offload_8bit(model, parameter, name, config.torch_dtype, folder, index, None)
            continue
        on_cpu = place == "disk" or _is_offloaded(place, places)
        device = CPU if on_cpu else torch.device(place)
        if name in quantized:
            if config.load_in_4bit:
                parameter.data = parameter.data.to(config.torch_dtype)  # the dtype in which values are dequantized
            elif parameter.device != CPU:
                parameter.data = parameter.data.to(CPU)  # it is quantized only while it moves from there
            _put(model, name, parameter.to(device=device))  # quantizes
            continue
        dtype = torch.float32 if is_among(name, config.keep_in_fp32_modules or ()) else config.torch_dtype
        value = parameter.data.to(dtype if parameter.is_floating_point() else parameter.dtype)
        if place == "disk":
            assert folder is not None
            offload_weight(value, name, folder, index)
            _put(model, name, nn.Parameter(value.to("meta"), parameter.requires_grad))  # which keeps the dtype
        else:
            _put(model, name, nn.Parameter(value.to(device), parameter.requires_grad))
    for name, buffer in list(model.named_buffers()):
        place = device_of(name, places)
        if place != "disk" and not _is_offloaded(place, places):
            set_module_tensor_to_device(model, name, place, value=buffer)
    placed = {name for name, _ in parameters}
    retie_parameters(model, [sorted(group, key=lambda name: name not in placed) for group in tied])
    if folder is not None:
        save_offload_index(index, folder)
    return index


def _put(model: nn.Module, name: str, parameter: Any) -> None:
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._parameters[leaf] = parameter


def quantize_and_offload_8bit(
    model: nn.Module,
    param: torch.Tensor,
    param_name: str,
    new_dtype: torch.dtype,
    offload_folder: StrPath,
    offload_index: Index,
    fp16_statistics: torch.Tensor | None,
) -> None:
    """Quantize a weight to 8 bits, write it with its scales into a folder, and move it to the meta device in the model.

    Args:
        model: The model that has the weight, in a layer of bitsandbytes or in a linear one.
        param: The weight, of shape `(out_features, in_features)`.
        param_name: Its name in the model.
        new_dtype: The dtype in which it is written when it is not a quantized weight.
        offload_folder: The folder.
        offload_index: The index of the folder; gets an entry for each written tensor.
        fp16_statistics: Its scales, when it is in 8 bits already.
    """
    is_quantized = type(param).__name__ == "Int8Params" or fp16_statistics is not None
    if not is_quantized:
        value = param.data.to(new_dtype) if param.is_floating_point() else param.data
        offload_weight(value, param_name, offload_folder, offload_index)
    elif fp16_statistics is not None:
        offload_weight(param.data, param_name, offload_folder, offload_index)
        offload_weight(fp16_statistics, scales_name(param_name), offload_folder, offload_index)
    else:
        weight = library("Quantizing a weight").Int8Params(param.data.cpu(), requires_grad=False).to("cpu")
        offload_weight(weight.data, param_name, offload_folder, offload_index)
        offload_weight(weight.SCB, scales_name(param_name), offload_folder, offload_index)
    set_module_tensor_to_device(model, param_name, "meta")


def _free_statistics_after_use(model: nn.Module, places: Mapping[str, Device]) -> None:
    """Have offloaded layers free the copy of their weight that bitsandbytes keeps beside it."""
    for name, layer in quantized_layers(model).items():
        if _is_offloaded(device_of(name, places), places) and hasattr(layer, "state"):
            layer.register_forward_hook(_free_copies)


def _free_copies(layer: Any, args: Any, output: Any) -> None:
    if layer.state.CB is not None and layer.state.CB.device != CPU:  # in CPU memory it is the memory-mapped file
        layer.state.CB = layer.state.SCB = None


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """The device of the first parameter of a module.

    Args:
        parameter: The module.
    """
    return next(parameter.parameters()).device
