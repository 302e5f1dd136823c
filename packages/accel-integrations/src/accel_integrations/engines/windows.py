"""Where engines keep the gradients of an open accumulation window, so that checkpoints can hold them.

A window is open between a micro-batch that is not a sync step and the next one that is. Until its end each rank has the
gradients of its own losses, unreduced and of the full shape: so they fit every engine that can keep them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accel_ops.modules import to_local


class WindowGradients(ABC):
    """Reads and writes this rank's gradients of an open window; `model` is always without its wrappers."""

    @abstractmethod
    def can_keep(self, model: nn.Module) -> bool:
        """Whether each of the model's gradients is a plain tensor of the full shape until the window ends."""

    @abstractmethod
    def read(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The gradients so far, by name of the parameter; parameters without one are left out. Nothing is copied."""

    @abstractmethod
    def write(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Replace the gradients of all parameters: those that are not given have none.

        Args:
            model: A prepared model.
            gradients: By name of the parameter, of its full shape; moved to its device, cast to its gradients' dtype.
        """


class InGrad(WindowGradients):
    """Gradients accumulate in `.grad`."""

    def can_keep(self, model: nn.Module) -> bool:
        """Unless parameters are DTensors."""
        return all(to_local(parameter) is parameter for parameter in model.parameters())

    def read(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """What is in `.grad` of the parameters."""
        return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}

    def write(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Put them into `.grad` of the parameters."""
        for name, parameter in model.named_parameters():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype)


class Unsharded(WindowGradients):
    """`fully_shard` keeps unsharded gradients beside its parameters while they are not reduce-scattered.

    They are in `.grad` of the unsharded parameter where they are reduced in the dtype they are computed in, else in
    `unsharded_accumulated_grad`, which torch adds to in any case (`torch.distributed.fsdp._fully_shard._fsdp_param`).
    """

    def can_keep(self, model: nn.Module) -> bool:
        """Unless tensor parallelism shards what `fully_shard` unshards, or parameters are DTensors without it."""
        keepers = _keepers(model)
        return all(
            not keepers[id(parameter)][0].is_dtensor if id(parameter) in keepers else to_local(parameter) is parameter
            for parameter in model.parameters()
        )

    def read(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Those of sharded parameters from where torch keeps them, and `.grad` of the others."""
        keepers = _keepers(model)
        found = {
            name: _unsharded_gradient(keepers[id(parameter)][0]) if id(parameter) in keepers else parameter.grad
            for name, parameter in model.named_parameters()
        }
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def write(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Put those of sharded parameters where torch adds to them, and the others into `.grad`."""
        keepers = _keepers(model)
        for name, parameter in model.named_parameters():
            parameter.grad, gradient = None, gradients.get(name)
            if id(parameter) not in keepers:
                parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype)
                continue
            keeper, policy = keepers[id(parameter)]
            if (unsharded := getattr(keeper, "_unsharded_param", None)) is not None:
                unsharded.grad = None
            dtype = policy.reduce_dtype or policy.param_dtype or parameter.dtype
            keeper.unsharded_accumulated_grad = None if gradient is None else gradient.to(keeper.device, dtype)


def _unsharded_gradient(keeper: Any) -> torch.Tensor | None:
    gradient: torch.Tensor | None = keeper.unsharded_accumulated_grad
    return getattr(getattr(keeper, "_unsharded_param", None), "grad", None) if gradient is None else gradient


def _keepers(model: nn.Module) -> dict[int, tuple[Any, Any]]:
    """What `fully_shard` keeps of each parameter, with its mixed precision, by the parameter's id in both of its forms."""
    found = {}
    for module in model.modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for keeper, policy in ((each, group.mp_policy) for group in groups if group for each in group.fsdp_params):
            found[id(keeper.sharded_param)] = keeper, policy
            if hasattr(keeper, "_unsharded_param"):
                found[id(keeper._unsharded_param)] = keeper, policy
    return found
