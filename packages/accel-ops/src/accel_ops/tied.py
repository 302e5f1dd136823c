"""Tied parameters: those that a model has under several names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_ops.modules import to_local, walk

META = torch.device("meta")


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """An id of a tensor's storage, equal for tensors that share it: device, address and length in bytes.

    For a DTensor, it is that of the local shard; for another tensor that wraps tensors (torchao's, for one), that of the
    first of them.
    """
    tensor = to_local(tensor)
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return id_tensor_storage(getattr(tensor, names[0]))
    if tensor.device.type == "meta":
        return tensor.device, id(tensor), 0  # without memory nothing can be shared
    if tensor.device.type == "xla":  # its memory has no address that Python could see
        return tensor.device, sys.modules["torch_xla"]._XLAC._xla_get_tensor_id(tensor), tensor.nbytes
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def find_shared_names(state_dict: Mapping[str, Any]) -> list[list[str]]:
    """Groups of names that stand for the very same tensor (tied weights), in their order in `state_dict`.

    Different views of one storage are not the same tensor.
    """
    groups: dict[Any, list[str]] = {}
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel():
            view = (value.storage_offset(), value.shape, value.stride(), value.dtype)
            groups.setdefault((id_tensor_storage(value), view), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def names_by_parameter(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter, parameters and names in the model's order; tied ones have several.

    Args:
        model: The model, which may be on the meta device.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for path, module in walk(model, repeat_shared=True):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(parameter, []).append(f"{path}.{key}" if path else key)
    return names


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """The names of tied parameters.

    Args:
        model: The model, which may be on the meta device.
        kwargs: Accepted for compatibility with accelerate 1.15, and not used.

    Returns:
        For each of these parameters its names, sorted; the parameters are in the model's order.

    Example:
        ```python
        find_tied_parameters(gpt2)  # [["lm_head.weight", "transformer.wte.weight"]]
        ```
    """
    return [sorted(names) for names in names_by_parameter(model).values() if len(names) > 1]


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Tie parameters again after each name was loaded separately; those on different devices are not tied.

    Args:
        model: The model.
        tied_params: What `find_tied_parameters` gave.
    """
    for group in tied_params:
        parameters = {name: _find(model, name) for name in group}
        values = [parameter for parameter in parameters.values() if parameter is not None]
        if not values:
            continue
        shared_parameter = next((value for value in values if value.device.type != "meta"), values[0])
        for name, parameter in parameters.items():
            if (
                parameter is not None
                and parameter is not shared_parameter
                and parameter.device in (shared_parameter.device, META)
            ):
                owner, _, last = name.rpartition(".")
                setattr(model.get_submodule(owner), last, shared_parameter)


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: torch.device | str
) -> Callable[[nn.Module], Any]:
    """Wrap a `param_init_fn` so that tied weights stay tied.

    Args:
        param_init_fn: Materializes a module's own parameters.
        model: The model, whose parameters may be on the meta device.
        device: Accepted for compatibility with accelerate 1.15, and not used: `param_init_fn` knows where.

    Returns:
        The wrapped function; `param_init_fn` itself where nothing is tied.
    """
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append((module, name))
    ties = [places for places in owners.values() if len(places) > 1]
    if not ties:
        return param_init_fn

    def init_and_tie(module: nn.Module) -> Any:
        result = param_init_fn(module)
        for places in ties:
            if not any(owner is module for owner, _ in places):
                continue
            parameters = [getattr(owner, name) for owner, name in places]
            shared_parameter = next((candidate for candidate in parameters if not candidate.is_meta), parameters[0])
            for owner, name in places:
                setattr(owner, name, shared_parameter)
        return result

    return init_and_tie


def _find(model: nn.Module, name: str) -> nn.Parameter | None:
    owner, _, last = name.rpartition(".")
    try:
        return model.get_submodule(owner)._parameters.get(last)
    except AttributeError:
        return None
