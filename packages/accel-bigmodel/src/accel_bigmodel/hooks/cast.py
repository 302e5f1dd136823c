"""Weights that are stored in one dtype and computed with in another."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import torch
from torch import nn
from typing_extensions import override

from accel_bigmodel.hooks.hook import ModelHook, add_hook_to_module
from accel_state.public_names import known_as

Module = TypeVar("Module", bound=nn.Module)
CAST_LAYERS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
)  # fmt: skip


@known_as("accelerate.hooks.LayerwiseCastingHook")
class LayerwiseCastingHook(ModelHook):
    """Casts a module's weights for its forward pass, and back.

    Args:
        storage_dtype: Dtype of the weights between forward passes.
        compute_dtype: Dtype of the weights during forward passes.
        non_blocking (`bool`): Let casts overlap with other work.
    """

    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    non_blocking: bool

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    @override
    def init_hook(self, module: Module) -> Module:
        """Cast the weights to `storage_dtype`."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    @override
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast the weights to `compute_dtype`."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    @override
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Cast the weights to `storage_dtype`."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolution layers in a small dtype, and compute in another.

    Args:
        module: The model.
        storage_dtype: Dtype of the weights between forward passes, for instance `torch.float8_e4m3fn`.
        compute_dtype: Dtype of the weights during forward passes, for instance `torch.bfloat16`.
        skip_modules_pattern: Regular expressions; modules whose names match one are skipped, with all their submodules.
        skip_modules_classes: Classes whose modules are skipped, with all their submodules.
        non_blocking (`bool`): Let casts overlap with other work.
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    classes = tuple(skip_modules_classes or ())

    def attach(layer: nn.Module, name: str) -> None:
        if isinstance(layer, classes) or any(re.search(pattern, name) for pattern in patterns):
            return
        if isinstance(layer, CAST_LAYERS):
            add_hook_to_module(layer, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
            return
        for key, child in layer.named_children():
            attach(child, f"{name}.{key}" if name else key)

    attach(module, "")
