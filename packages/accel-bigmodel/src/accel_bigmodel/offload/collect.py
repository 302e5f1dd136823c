"""The full state dict of a model with offloaded weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.hooks.hook import hooks_of
from accel_bigmodel.offload.loader import OffloadedWeightsLoader
from accel_bigmodel.sizes import get_non_persistent_buffers
from accel_bigmodel.tensors import align_module_device, set_module_tensor_to_device
from accel_ops.tied import names_by_parameter


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of a model, with offloaded weights in place of those on the meta device.

    Args:
        model: The model.

    Returns:
        The tensors by name, all in CPU memory. Weights on disk are memory-mapped, not read.

    Raises:
        ValueError: When a weight is on the meta device and no hook offloads it.
    """
    state_dict: dict[str, torch.Tensor] = dict(model.state_dict())
    left_out = get_non_persistent_buffers(model, recurse=True, fqns=True)
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for hook in _offloading(module):
            for name in hook.original_devices:
                if prefix + name in state_dict and state_dict[prefix + name].is_meta and prefix + name not in left_out:
                    state_dict[prefix + name] = hook.weights_map[name]
    ties = [names for names in names_by_parameter(model).values() if len(names) > 1]
    for group in ties:
        values = [state_dict[name] for name in group if not state_dict[name].is_meta]
        for name in group if values else ():
            state_dict[name] = values[0]
    empty = [name for name, tensor in state_dict.items() if tensor.is_meta]
    if empty:
        raise ValueError(
            f"Weights of {type(model).__name__} are on the meta device, and no hook offloads them: {empty[:5]}. Load a "
            "checkpoint first."
        )
    on_cpu = {id(tensor): tensor.to("cpu") for tensor in state_dict.values()}  # tied ones once
    return {name: on_cpu[id(tensor)] for name, tensor in state_dict.items()}


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: int | str | torch.device = "cpu",
) -> dict[str, Any]:
    """Put the offloaded weights of one module into a state dict.

    Args:
        module: The module.
        module_name: The fully qualified name of one of its weights.
        state_dict: Changed in place: entries with the names of these weights are replaced.
        device_to_put_offload: The device of these entries.

    Returns:
        `state_dict`.
    """
    prefix = f"{path}." if (path := module_name.rpartition(".")[0]) else ""
    device = torch.device(device_to_put_offload)
    with align_module_device(module, device):
        for name, tensor in module.state_dict().items():
            if prefix + name in state_dict:
                state_dict[prefix + name] = tensor.to(device)  # buffers that are not offloaded were elsewhere
    return state_dict


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Mapping[str, Any]] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Load the weights of a folder into a model, in CPU memory.

    Args:
        model: The model.
        index: Dtype and shape of the weights, by name; nothing happens when there are none.
        offload_folder: The folder.
    """
    if not index:
        return
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    for name in weights:
        set_module_tensor_to_device(model, name, "cpu", value=weights[name])


def has_offloaded_weights(model: nn.Module) -> bool:
    """Whether weights of any module of a model are offloaded between forward passes."""
    return any(True for module in model.modules() for _ in _offloading(module))


def _offloading(module: nn.Module) -> Iterator[AlignDevicesHook]:
    return (hook for hook in hooks_of(module) if isinstance(hook, AlignDevicesHook) and hook.offload)
