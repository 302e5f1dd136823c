"""Models of a pipeline that are on a device in turn, and offloaded to CPU memory otherwise."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from typing_extensions import override

from accel_bigmodel.hooks.hook import ModelHook, add_hook_to_module, remove_hook_from_module
from accel_ops.memory import clear_device_cache
from accel_ops.placement import send_to_device
from accel_state.devices import resolve_device
from accel_state.processes import PartialState
from accel_state.public_names import known_as

Module = TypeVar("Module", bound=nn.Module)


@known_as("accelerate.hooks.CpuOffload")
class CpuOffload(ModelHook):
    """Moves a model to a device for its forward pass; it stays there until it is offloaded by a call.

    Args:
        execution_device: The device; that of this process when None.
        prev_module_hook: The hook of the model that runs before, which is offloaded first.
    """

    execution_device: int | str | torch.device
    prev_module_hook: UserCpuOffloadHook | None

    def __init__(
        self,
        execution_device: str | int | torch.device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.execution_device = execution_device if execution_device is not None else PartialState().default_device
        self.prev_module_hook = prev_module_hook

    @override
    def init_hook(self, module: Module) -> Module:
        """Offload the model to CPU memory."""
        return module.to("cpu")

    @override
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move model and inputs to the device."""
        here = resolve_device(self.execution_device)
        if self.prev_module_hook is not None and next(module.parameters()).device != here:
            self.prev_module_hook.offload()
            clear_device_cache()
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


@known_as("accelerate.hooks.UserCpuOffloadHook")
class UserCpuOffloadHook:
    """A handle of a model with `CpuOffload`, to offload it or to remove its hook.

    Args:
        model: The model.
        hook: Its hook.
    """

    model: nn.Module
    hook: CpuOffload

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Offload the model to CPU memory."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: int | str | torch.device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model in CPU memory until it runs; then it stays on the device until `offload` is called.

    Models that run one after the other are chained: each gets the hook of the one before, and offloads that first.

    Args:
        model: The model.
        execution_device: The device; that of this process when None.
        prev_module_hook: The hook of the model that runs before.

    Returns:
        The model and its hook.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
