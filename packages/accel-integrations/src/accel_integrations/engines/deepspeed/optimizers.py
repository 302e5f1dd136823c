"""Optimizers of DeepSpeed in the place of PyTorch's, for states that it keeps in CPU memory."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from accel_state.errors import missing_library
from accel_state.libraries import is_deepspeed_available


@dataclass(frozen=True)
class _Row:
    """An optimizer of DeepSpeed, and the names of those whose place it takes."""

    replaces: tuple[str, ...]
    module: str
    name: str
    settings: tuple[str, ...]


IN_MAIN_MEMORY = (
    _Row(("Adagrad",), "deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad", ("eps",)),
    _Row(("Adam", "AdamW"), "deepspeed.ops.adam", "DeepSpeedCPUAdam", ("betas", "eps")),
    _Row(("Lion",), "deepspeed.ops.lion", "DeepSpeedCPULion", ("betas",)),
)

NOT_KNOWN = ("amsgrad", "maximize", "differentiable")
"""What PyTorch's optimizers can do and DeepSpeed's cannot."""


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> Any:
    """DeepSpeed's optimizer for the CPU with the groups and settings of one of PyTorch.

    Args:
        optimizer: Adam, AdamW, Adagrad or Lion; another one comes back as it is.

    Raises:
        MissingLibraryError: Without DeepSpeed.
        ValueError: For a setting that DeepSpeed's does not have, such as `amsgrad`.
    """
    if not is_deepspeed_available():
        raise missing_library("deepspeed", "deepspeed", "map_pytorch_optim_to_deepspeed()")
    name = type(optimizer).__name__
    found = next((row for row in IN_MAIN_MEMORY if name in row.replaces), None)
    if found is None:
        return optimizer
    lost = [name for name in NOT_KNOWN if any(group.get(name) for group in optimizer.param_groups)]
    if lost:
        raise ValueError(
            f"{name}({', '.join(f'{one}=True' for one in lost)}) has no counterpart in {found.module}.{found.name}, which "
            "keeps its state in CPU memory: leave that out, set zero_force_ds_cpu_optimizer to false in the DeepSpeed "
            "configuration, or do not offload the optimizer."
        )
    kind: Any = getattr(import_module(found.module), found.name)
    settings = {key: optimizer.defaults[key] for key in ("lr", "weight_decay", *found.settings)}
    if found.name == "DeepSpeedCPUAdam":
        settings["adamw_mode"] = name == "AdamW"
    return kind(optimizer.param_groups, **settings)
