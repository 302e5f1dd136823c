"""Writing the full weights of a prepared model into a model folder, without any training state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from accel_bigmodel.weights.write import parse_size, write_model_folder
from accel_integrations.prepared.parameters import plain_name
from accel_integrations.training_state.parallel_writer import ParallelFolderWriter, PlannedFile, can_fill_in, fill_in
from accel_ops.collectives.agreement import Ranks, Storage, find_storage
from accel_ops.collectives.participants import begin_call, outcome_of, publishing_outcome
from accelerate.compat.seams import is_overridden

if TYPE_CHECKING:
    from accelerate.interface import AcceleratorInterface


def save_model(
    accelerator: AcceleratorInterface,
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Write a model folder; see `Accelerator.save_model`."""
    parse_size(max_shard_size)
    if not isinstance(model, nn.Module):
        raise TypeError(f"save_model() needs a torch.nn.Module, got {type(model).__name__}. Pass the prepared model.")
    folder = Path(os.path.abspath(Path(save_directory).expanduser()))
    if folder.is_file():
        raise NotADirectoryError(f"save_model() writes a folder, but {folder} is a file. Name a folder.")
    on_each_node = accelerator.project_configuration.save_on_each_node
    sharded_by = None if accelerator.engine.is_replicated else accelerator.engine.name
    call = begin_call("save_model", accelerator.state, {}, sharded_by=sharded_by, main_writes_all=not on_each_node)
    if call is None or call.everyone:
        ranks = Ranks(accelerator.state)
        storage = find_storage(ranks, folder)
        weights = _shards(accelerator, model, ranks, storage) if safe_serialization and not on_each_node else None
        if weights is not None:
            _write_together(ranks, weights, folder, max_shard_size)
            return
        is_writer = storage.writes_shared(on_each_node)
        with accelerator.engine.keeping_full_states(is_writer):
            state_dict = accelerator.get_state_dict(model)

        def write() -> None:
            if is_writer:
                write_model_folder(_saved(state_dict, model), folder, max_shard_size, safe_serialization)

        ranks.together(f"write the model folder {folder}", write)
    elif accelerator.state.process_index > 0:
        if error := outcome_of(call, "save_model").get("error"):
            raise RuntimeError(f"save_model() failed on the main process when writing {folder}: {error}")
    else:
        with publishing_outcome(call):
            state_dict = accelerator.get_state_dict(model)
            write_model_folder(_saved(state_dict, model), folder, max_shard_size, safe_serialization)


def _shards(
    accelerator: AcceleratorInterface, model: nn.Module, ranks: Ranks, storage: Storage
) -> dict[str, Any] | None:
    """This rank's shards of the weights, where all ranks can write them into one folder; None where they cannot."""
    if ranks.count == 1 or is_overridden(accelerator, "get_state_dict") or accelerator.engine.is_replicated:
        return None

    def collect() -> dict[str, Any] | None:
        weights = accelerator.engine.sharded_weights(model)
        if weights is None:
            return None
        return _saved(weights, model)

    weights = ranks.each("collect the weights", collect)
    possible = weights is not None and storage.owner == 0 and can_fill_in(weights)
    return weights if all(ranks.all_gather(possible)) else None


def _write_together(ranks: Ranks, weights: dict[str, Any], folder: Path, max_shard_size: int | str) -> None:
    """Write the model folder on all ranks, each its byte ranges of every file."""
    doing = f"write the model folder {folder}"
    joint: list[ParallelFolderWriter] = []

    def begin() -> tuple[Path, dict[str, PlannedFile]]:
        joint.append(ParallelFolderWriter(folder, weights, max_shard_size))
        return joint[0].path, joint[0].files

    try:
        path, files = ranks.on_main(doing, begin)
        written = ranks.together(doing, lambda: fill_in(path, files, weights))
        ranks.on_main(doing, lambda: joint[0].publish(sum(written)))
    except BaseException:
        for folder_writer in joint:
            folder_writer.discard()
        raise


def _saved(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """A state dict under the names of the user's model: a child that was compiled has others.

    Raises:
        RuntimeError: Some tensors are on the meta device.
    """
    if empty := sorted(name for name, tensor in state_dict.items() if getattr(tensor, "is_meta", False)):
        raise RuntimeError(
            f"save_model() cannot save tensors on the meta device, which have no values: {', '.join(empty[:5])} of "
            f"{type(model).__name__}. Load a checkpoint into the model first."
        )
    return {plain_name(name): value for name, value in state_dict.items()}
