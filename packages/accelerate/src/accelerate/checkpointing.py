"""Functions of accelerate 1.15 that write and read training states without an `Accelerator`.

`Accelerator.save_state` and `load_state` do more: their checkpoints appear complete or not at all, and are verified.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from accel_integrations.training_state.formats.full import FullStatesLoad, PlainOptimizers, write_full_states
from accel_integrations.training_state.interface import FolderWriter, LoadRequest
from accel_integrations.unwrap import extract_model_from_parallel
from accel_ops.files.durable import make_folder
from accel_ops.files.filenames import MODEL_NAME as MODEL_NAME
from accel_ops.files.filenames import OPTIMIZER_NAME as OPTIMIZER_NAME
from accel_ops.files.filenames import RNG_STATE_NAME as RNG_STATE_NAME
from accel_ops.files.filenames import SAFE_MODEL_NAME as SAFE_MODEL_NAME
from accel_ops.files.filenames import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from accel_ops.files.filenames import SAMPLER_NAME as SAMPLER_NAME
from accel_ops.files.filenames import SCALER_NAME as SCALER_NAME
from accel_ops.files.filenames import SCHEDULER_NAME as SCHEDULER_NAME
from accel_ops.files.filenames import WEIGHTS_NAME as WEIGHTS_NAME
from accel_ops.files.serialization import load
from accel_state.processes import PartialState
from accelerate.checkpoint.reading import (
    Checkpoint,
    Receivers,
    TrainingState,
    read_state,
    read_verified,
    torch_load_arguments,
)
from accelerate.checkpoint.restore import apply_objects, apply_random_states, check_objects, naming_what_was_loaded
from accelerate.checkpoint.writing import custom_object_file, write_custom_object, write_own_state, write_shared_state
from accelerate.compat.legacy import legacy_getattr

__getattr__ = legacy_getattr(__name__)  # what programs import from here

StrPath = str | os.PathLike[str]


def save_accelerator_state(
    output_dir: StrPath,
    model_states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write the files of a training state, each with an atomic rename.

    Args:
        output_dir: Folder, created if missing.
        model_states: One state dict per model.
        optimizers: With `state_dict()`.
        schedulers: With `state_dict()`.
        dataloaders: Prepared loaders.
        process_index: Rank of this process.
        step: Step counter to keep.
        scaler: The loss scaler, if there is one.
        save_on_each_node: Whether the main process of every machine writes the replicated state.
        safe_serialization: Write weights as safetensors, not with `torch.save`.

    Returns:
        `output_dir`.

    Raises:
        TypeError: Some state could not be loaded again without running code from the file.
        OSError: A file could not be written.
    """
    files = FolderWriter(make_folder(output_dir))
    if _writes_shared(save_on_each_node):
        write_full_states(
            files, model_states, [optimizer.state_dict() for optimizer in optimizers], safe_serialization
        )
        write_shared_state(files, schedulers, dataloaders, None if scaler is None else scaler.state_dict())
    write_own_state(files, dataloaders, process_index, step)
    return Path(output_dir)


def load_accelerator_state(
    input_dir: StrPath,
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: Any = None,
    map_location: str | None = None,
    load_kwargs: Mapping[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Load the files of a training state into objects, after all of them were read and verified.

    Args:
        input_dir: Folder.
        models: Prepared or plain models.
        optimizers: With `load_state_dict(state)`.
        schedulers: With `load_state_dict(state)`.
        dataloaders: Prepared loaders.
        process_index: Rank of this process.
        scaler: The loss scaler, if there is one.
        map_location: Where tensors of optimizers go: None or "cpu", or "on_device".
        load_kwargs: Further arguments of `torch.load`; `map_location` is for optimizers.
        load_model_func_kwargs: Further arguments of the models' `load_state_dict`.

    Returns:
        Values for the caller to restore: the key `step`, if it was saved.

    Raises:
        ValueError: The checkpoint is missing, damaged, or does not fit the objects.
        TypeError: `map_location` is not known.
    """
    location, options = torch_load_arguments(load_kwargs, map_location, PartialState().device)
    checkpoint = Checkpoint.open(Path(input_dir))
    receivers = Receivers(schedulers, dataloaders, scaler)

    def read() -> tuple[FullStatesLoad, TrainingState]:
        request = LoadRequest(checkpoint, location, options, load_model_func_kwargs)
        pending = FullStatesLoad(request, optimizers, PlainOptimizers())
        return pending, read_state(checkpoint, receivers, process_index, load_kwargs=options)

    pending, state = read_verified(read, checkpoint.verify)
    pending.check_models([extract_model_from_parallel(model) for model in models])
    pending.check()
    check_objects(checkpoint, receivers, state)
    with naming_what_was_loaded() as loaded:
        apply_objects(receivers, state, loaded)
        loaded.append("optimizers and models")
        pending.apply()
    apply_random_states(state.random_states)
    return {} if state.step is None else {"step": state.step}


def save_custom_state(obj: Any, path: StrPath, index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of an object to `custom_checkpoint_<index>.pkl` in the folder `path`.

    Raises:
        TypeError: Its state could not be loaded again without running code from the file.
    """
    if _writes_shared(save_on_each_node):
        write_custom_object(FolderWriter(make_folder(path)), obj, index)


def load_custom_state(obj: Any, path: StrPath, index: int = 0) -> None:
    """Load the state in `custom_checkpoint_<index>.pkl` of the folder `path` into an object.

    Raises:
        ValueError: The file is damaged or holds more than plain data; no code of it is run.
    """
    obj.load_state_dict(load(Path(path, custom_object_file(index)), map_location="cpu"))


def _writes_shared(save_on_each_node: bool) -> bool:
    state = PartialState()
    return state.is_local_main_process if save_on_each_node else state.is_main_process
