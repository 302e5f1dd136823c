"""`torch.compile` for prepared models: the full model, or regional compilation of its repeated blocks."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from accel_integrations.precision.autocast import AutocastForward
from accel_ops.modules import has_compiled_regions, has_repeated_blocks, is_compiled_module, is_repeated_blocks
from accel_state.enums import DynamoBackend
from accel_state.settings.compile import TorchDynamoPlugin


def compile_model(model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
    """Compile a model as the settings say; one that is compiled already is left alone."""
    if plugin.backend == DynamoBackend.NO or is_compiled_module(model) or has_compiled_regions(model):
        return model
    if plugin.use_regional_compilation:
        return compile_regions(model, **plugin.to_kwargs())
    compiled: Any = torch.compile(model, **plugin.to_kwargs())
    return compiled


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile each repeated block by itself (regional compilation): the compiler then runs once for all of them.

    Args:
        module (`torch.nn.Module`): The model; not changed.
        compile_kwargs: For `torch.compile`.

    Returns:
        A model that shares all parameters with `module`, which it keeps as `_orig_mod`. Without repeated blocks, the
        full model compiled.
    """
    if is_repeated_blocks(module):
        blocks: list[Any] = [torch.compile(block, **compile_kwargs) for block in module.children()]
        return _remember(nn.ModuleList(blocks), module)
    if not has_repeated_blocks(module):
        compiled: Any = torch.compile(module, **compile_kwargs)
        return compiled
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update({name: _bound_to(twin, module, value) for name, value in module.__dict__.items()})
    twin._modules = {
        name: child if child is None else compile_regions(child, **compile_kwargs)
        for name, child in module._modules.items()
    }
    return _remember(twin, module)


def _bound_to(twin: nn.Module, module: nn.Module, value: Any) -> Any:
    """A method that an attribute of `module` holds must be called on its twin, or nothing would run compiled."""
    if isinstance(value, AutocastForward):
        return value.bound_to(twin)
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, twin)
    return value


def _remember(twin: nn.Module, module: nn.Module) -> nn.Module:
    twin.__dict__["_orig_mod"] = module  # past nn.Module, which would register it as a child
    return twin


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile repeated blocks in place, for engines that keep references to the modules they were given.

    Args:
        module (`torch.nn.Module`): The model.
        compile_kwargs: For `torch.nn.Module.compile`.
    """
    if is_repeated_blocks(module):
        for block in module.children():
            block.compile(**compile_kwargs)
    elif has_repeated_blocks(module):
        for child in module.children():
            compile_regions_deepspeed(child, **compile_kwargs)
    else:
        module.compile(**compile_kwargs)


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile repeated blocks in place, as `compile_regions_deepspeed` does, and return the model.

    Args:
        module (`torch.nn.Module`): The model.
        compile_kwargs: For `torch.nn.Module.compile`.
    """
    compile_regions_deepspeed(module, **compile_kwargs)
    return module
