"""CPU optimizers of DeepSpeed that replace PyTorch's where optimizer states are offloaded to CPU memory."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from accel_state.errors import missing_library
from accel_state.libraries import is_deepspeed_available


@dataclass(frozen=True)
class _Row:
    """An optimizer of DeepSpeed, and the names of those that it replaces."""

    replaces: tuple[str, ...]
    module: str
    name: str
    settings: tuple[str, ...]


CPU_OPTIMIZERS = (
    _Row(("Adagrad",), "deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad", ("eps",)),
    _Row(("Adam", "AdamW"), "deepspeed.ops.adam", "DeepSpeedCPUAdam", ("betas", "eps")),
    _Row(("Lion",), "deepspeed.ops.lion", "DeepSpeedCPULion", ("betas",)),
)

NOT_KNOWN = ("amsgrad", "maximize", "differentiable")
"""Options of PyTorch's optimizers that DeepSpeed's do not have."""


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> Any:
    """The CPU optimizer of DeepSpeed with the parameter groups and options of one of PyTorch.

    Args:
        optimizer: Adam, AdamW, Adagrad or Lion; another one comes back as it is.

    Raises:
        MissingLibraryError: Without DeepSpeed.
        ValueError: For an option that DeepSpeed's does not have, such as `amsgrad`.
    """
    if not is_deepspeed_available():
        raise missing_library("deepspeed", "deepspeed", "map_pytorch_optim_to_deepspeed()")
    name = type(optimizer).__name__
    counterpart = next((row for row in CPU_OPTIMIZERS if name in row.replaces), None)
    if counterpart is None:
        return optimizer
    lost = [name for name in NOT_KNOWN if any(group.get(name) for group in optimizer.param_groups)]
    if lost:
        raise ValueError(
            f"{name}({', '.join(f'{one}=True' for one in lost)}) has no counterpart in {counterpart.module}.{counterpart.name}, "
            "which keeps the optimizer state in CPU memory. Leave it out, set zero_force_ds_cpu_optimizer to false in "
            "the DeepSpeed configuration, or do not offload the optimizer."
        )
    kind: Any = getattr(import_module(counterpart.module), counterpart.name)
    settings = {key: optimizer.defaults[key] for key in ("lr", "weight_decay", *counterpart.settings)}
    if counterpart.name == "DeepSpeedCPUAdam":
        settings["adamw_mode"] = name == "AdamW"
    return kind(optimizer.param_groups, **settings)
