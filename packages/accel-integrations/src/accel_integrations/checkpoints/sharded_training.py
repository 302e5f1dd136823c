"""Checkpoints of sharded training, as other libraries ask for them: known by name, not in this release yet."""

from __future__ import annotations

from typing import Any, NoReturn


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    output_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> NoReturn:
    """Refuse: training with FSDP is not in this release."""
    _refuse("save_fsdp_model")


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    input_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> NoReturn:
    """Refuse: training with FSDP is not in this release."""
    _refuse("load_fsdp_model")


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    output_dir: str,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> NoReturn:
    """Refuse: training with FSDP is not in this release."""
    _refuse("save_fsdp_optimizer")


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    input_dir: str,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> NoReturn:
    """Refuse: training with FSDP is not in this release."""
    _refuse("load_fsdp_optimizer")


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name}: training with FSDP comes with a later release. Train with DDP, and store checkpoints with "
        "Accelerator.save_state."
    )
