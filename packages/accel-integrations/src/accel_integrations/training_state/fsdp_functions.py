"""Saving and loading one sharded model or optimizer at a time, as other libraries do it.

`Accelerator.save_state` and `load_state` do more: their checkpoints are written atomically and verified by checksums.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from accel_integrations.training_state.formats.forms import write_model, write_optimizer
from accel_integrations.training_state.interface import FolderWriter
from accel_integrations.training_state.loading import (
    LoadedStates,
    apply_model_state,
    read_model_state,
    read_optimizer_state,
)
from accel_integrations.training_state.reader import open_model_state, open_optimizer_state
from accel_ops.files.durable import make_folder
from accel_state.warning import warn_user


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write a prepared model in the form that the plugin names; all processes call this.

    Args:
        fsdp_plugin: Its `state_dict_type` is the form to write.
        accelerator: The accelerator whose processes write.
        model: As `prepare` returned it.
        output_dir: Folder, made if missing, that all processes see.
        model_index: Its position among the prepared models.
        adapter_only: Write only trainable parameters, those of an adapter.
        use_dcp: Without effect: sharded states are always written by torch.distributed.checkpoint.
    """
    _warn_unused(use_dcp)
    folder = _make_folder(accelerator, output_dir)
    write_model(model, FolderWriter(folder), fsdp_plugin.state_dict_type.name, model_index, adapter_only=adapter_only)
    accelerator.wait_for_everyone()


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Load what `save_fsdp_model` wrote, by any number of processes; all processes call this.

    Args:
        fsdp_plugin: Without effect: the form is that of the files.
        accelerator: The accelerator whose processes read.
        model: As `prepare` returned it.
        input_dir: The folder that was written to, or in it the folder of the sharded model.
        model_index: Its position among the prepared models.
        adapter_only: Read only trainable parameters.
        use_dcp: Without effect.

    Returns:
        The missing and unexpected names, as `torch.nn.Module.load_state_dict` returns them.

    Raises:
        ValueError: The state is missing or damaged, or does not fit; the message lists all differences.
    """
    _warn_unused(use_dcp)
    state = read_model_state(open_model_state(Path(input_dir), model_index), model, adapter_only=adapter_only)
    incompatible = apply_model_state(model, state, strict=not adapter_only)
    accelerator.wait_for_everyone()
    return incompatible


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the state of an optimizer; as `save_fsdp_model`.

    Args:
        fsdp_plugin: Its `state_dict_type` is the form to write.
        accelerator: The accelerator whose processes write.
        optimizer: As `prepare` returned it, or plain.
        model: Whose parameters it has, as `prepare` returned it.
        output_dir: Folder, made if missing, that all processes see.
        optimizer_index: Its position among the prepared optimizers.
        use_dcp: Without effect.
    """
    _warn_unused(use_dcp)
    folder = _make_folder(accelerator, output_dir)
    plain = getattr(optimizer, "optimizer", optimizer)
    write_optimizer(model, plain, FolderWriter(folder), fsdp_plugin.state_dict_type.name, optimizer_index)
    accelerator.wait_for_everyone()


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load what `save_fsdp_optimizer` wrote; as `load_fsdp_model`.

    Args:
        fsdp_plugin: Without effect: the form is that of the files.
        accelerator: The accelerator whose processes read.
        optimizer: As `prepare` returned it, or plain.
        model: Whose parameters it has, as `prepare` returned it.
        input_dir: The folder that was written to, or in it the folder of the sharded state.
        optimizer_index: Its position among the prepared optimizers.
        adapter_only: Without effect: an optimizer has states of trainable parameters only.
        use_dcp: Without effect.

    Raises:
        ValueError: There is no such state, it is damaged, or it does not fit.
    """
    _warn_unused(use_dcp)
    plain = getattr(optimizer, "optimizer", optimizer)
    state = read_optimizer_state(open_optimizer_state(Path(input_dir), optimizer_index), plain, model)
    LoadedStates(optimizers=[(plain, model, state)]).apply()
    accelerator.wait_for_everyone()


def _make_folder(accelerator: Any, path: str | os.PathLike[str]) -> Path:
    folder = make_folder(path)
    accelerator.wait_for_everyone()
    return folder


def _warn_unused(use_dcp: bool) -> None:
    if not use_dcp:
        warn_user(
            "use_dcp=False has no effect: sharded states are always written by torch.distributed.checkpoint. Leave it "
            "out."
        )
