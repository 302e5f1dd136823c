"""Properties of modules: compiled, with repeated blocks, with DTensors, tensor parallel, with loading code of their own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, overload

import torch
from torch import nn

PLAIN_LOADING = ("torch.nn.modules.module", "torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm")
"""Where the `_load_from_state_dict` is defined that takes tensors under their own names and shapes."""


def is_compiled_module(module: nn.Module) -> bool:
    """Whether it is what `torch.compile(module)` returned."""
    dynamo = sys.modules.get("torch._dynamo")  # imported by torch.compile
    return dynamo is not None and isinstance(module, dynamo.eval_frame.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether any of its submodules is compiled."""
    return "torch._dynamo" in sys.modules and any(is_compiled_module(part) for part in module.modules())


def is_repeated_blocks(module: nn.Module) -> bool:
    """Whether it is a list of several modules of one class, such as a transformer's layers."""
    return (
        isinstance(module, nn.ModuleList)
        and len(module) > 1
        and all(isinstance(part, module[0].__class__) for part in module)
    )


def has_repeated_blocks(module: nn.Module) -> bool:
    """Whether any of its submodules is a list of several modules of one class."""
    return any(is_repeated_blocks(part) for part in module.modules())


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether any parameter is a DTensor."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and any(isinstance(parameter, tensor.DTensor) for parameter in model.parameters())


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor, sharing its memory; any other tensor itself."""
    kind = sys.modules.get("torch.distributed.tensor")
    if kind is None or not isinstance(tensor, kind.DTensor):
        return tensor
    local: torch.Tensor = tensor._local_tensor
    return local


def full_tensor(tensor: Any) -> Any:
    """The full tensor of a DTensor, gathered on all ranks of its mesh, which must all call this; others as they are.

    An offloaded one is gathered on the device of its mesh, whose process group may serve no other, and stays there.
    """
    if not isinstance(tensor, torch.Tensor) or to_local(tensor) is tensor:
        return tensor
    sharded: Any = tensor
    device_type = sharded.device_mesh.device_type
    return (sharded if sharded.device.type == device_type else sharded.to(device_type)).full_tensor()


def customizes_loading(model: nn.Module) -> bool:
    """Whether a module overrides how its state dict is loaded, for instance to rename tensors.

    Then only the model itself knows which names and shapes it takes. That is so with hooks of `load_state_dict`, and where
    a module overrides `load_state_dict` or `_load_from_state_dict`.
    """
    return any(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or type(module).load_state_dict is not nn.Module.load_state_dict
        or type(module)._load_from_state_dict.__module__ not in PLAIN_LOADING
        for module in model.modules()
    )


def is_peft_model(model: nn.Module) -> bool:
    """Whether it is one of the peft library's, also inside a compiled or a replicated model."""
    peft = sys.modules.get("peft")  # imported wherever such a model was created
    if peft is None:
        return False
    while not isinstance(model, peft.PeftModel):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return False
        model = inner
    return True


def get_model_tp_size(model: nn.Module) -> int | None:
    """The tensor-parallel size of a model, as transformers sets it; None when it is not tensor parallel.

    transformers 5 notes it in `model.config.distributed_config`, an object or a dictionary; earlier ones on the model.
    """
    noted = getattr(getattr(model, "config", None), "distributed_config", None)
    of_config = noted.get("tp_size") if isinstance(noted, Mapping) else getattr(noted, "tp_size", None)
    sizes = (getattr(model, "tp_size", None), of_config)
    return next((size for size in sizes if isinstance(size, int)), None)


def walk(model: nn.Module, repeat_shared: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """All modules with their names, like `named_modules`, without its recursion.

    Args:
        model: The outermost module.
        repeat_shared: Yield a module under each of its names.
    """
    seen: set[nn.Module] = set()
    coming = [("", model)]
    while coming:
        path, module = coming.pop()
        if not repeat_shared:
            if module in seen:
                continue
            seen.add(module)
        yield path, module
        if module._modules:
            prefix = f"{path}." if path else ""
            coming += [(prefix + key, child) for key, child in reversed(module._modules.items()) if child is not None]


@overload
def get_module_children_bottom_up(model: nn.Module, return_fqns: Literal[False] = False) -> list[nn.Module]: ...
@overload
def get_module_children_bottom_up(model: nn.Module, return_fqns: Literal[True]) -> list[tuple[str, nn.Module]]: ...
def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> Any:
    """All modules of a model, each after its submodules; the model itself comes last.

    Args:
        model: The model.
        return_fqns (`bool`): Return pairs of dotted name and module.
    """
    named_modules = list(_bottom_up(model, ""))
    return named_modules if return_fqns else [module for _, module in named_modules]


def _bottom_up(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _bottom_up(child, f"{name}.{child_name}" if name else child_name)
    yield name, module


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """The parameters of some modules of a model, moved to a device: those that are not to be sharded.

    Args:
        modules: The modules, or a regular expression that matches their full names; None for no modules.
        model: The model.
        device: The target device.
    """
    chosen = modules_among(modules, model)
    return {parameter for module in chosen for parameter in module.to(device).parameters()}


def modules_among(modules: Iterable[nn.Module] | str | None, model: nn.Module) -> list[nn.Module]:
    """The modules of a model that are given themselves or by a regular expression that matches their full names."""
    if isinstance(modules, str):
        pattern = re.compile(modules)
        return [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    return list(modules or ())


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether a hook offloads the module's parameters between forward passes."""
    return bool(getattr(getattr(module, "_hf_hook", None), "offload", False))


def get_pretty_name(obj: Any) -> str:
    """The qualified name of a class or function, or of an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or getattr(named, "__name__", named))
