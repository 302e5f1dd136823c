"""Loading a checkpoint into a model that may have no memory yet."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from accel_bigmodel.device_map.check import (
    check_device_map,
    check_memory,
    check_places,
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
)
from accel_bigmodel.dtypes import as_dtype
from accel_bigmodel.offload.folder import Index, offload_weight, save_offload_index
from accel_bigmodel.weights.compare import Difference, compare, expected_tensors, extra_states
from accel_bigmodel.weights.contents import CheckpointContents, open_shard
from accel_bigmodel.weights.index import find_checkpoint
from accel_bigmodel.weights.placing import (
    DISK,
    DeviceMap,
    LoadOptions,
    Placement,
    device_of,
    load_tensors,
    plan_placements,
    scales_name,
)
from accel_bigmodel.weights.progress import ByteProgress
from accel_ops.files.durable import make_folder
from accel_ops.modules import customizes_loading
from accel_ops.tied import find_tied_parameters, retie_parameters


def needs_copy(placement: Placement, contents: CheckpointContents) -> bool:
    """Whether a weight has to be written again: its file cannot be memory-mapped, or has another dtype."""
    stored = contents.dtype_and_shape(placement.source)
    return contents.mapped_file(placement.source) is None or stored is None or stored[0] != placement.dtype


def check_room(placements: Sequence[Placement], contents: CheckpointContents, folder: StrPath | None) -> None:
    """Check that there is a folder, on a disk with enough room, for the weights that have to be written.

    Raises:
        ValueError: No folder was given although one is needed.
        OSError: The disk has not enough room.
    """
    written = [each for each in placements if each.is_offloaded and needs_copy(each, contents)]
    if not written:
        return
    first = written[0]
    if folder is None:
        reason = (
            "it is not in a safetensors file"
            if contents.mapped_file(first.source) is None
            else f"its dtype changes to {str(first.dtype).removeprefix('torch.')}"
        )
        raise ValueError(
            f"The device map offloads {first.name!r} to disk, and it has to be written there because {reason} "
            f"({len(written)} such weights): pass offload_folder."
        )
    total = sum(placement.num_bytes for placement in written)
    free = shutil.disk_usage(
        next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
    ).free
    if total > free:
        raise OSError(
            f"Offloading needs {total / 1e9:.2f} GB in {os.fspath(folder)}, where only {free / 1e9:.2f} GB are "
            "free: make room, choose another offload_folder, or load a safetensors checkpoint without a dtype."
        )


def leave_on_disk(
    placements: Sequence[Placement],
    contents: CheckpointContents,
    folder: StrPath | None,
    with_scales: bool = False,
    show_progress: bool = True,
) -> Index:
    """Make the index of offloaded weights, and write those that no safetensors file holds in the wanted dtype.

    Args:
        placements: What `plan_placements` gave.
        contents: The checkpoint.
        folder: Where weights and the index are written.
        with_scales: Include the scales of 8-bit weights.
        show_progress: Show a bar if it takes long.

    Returns:
        By name: `dtype` and `shape`, and `safetensors_file` and `weight_name` of those that are not in the folder.
    """
    index: Index = {}
    offloaded = [placement for placement in placements if placement.is_offloaded]
    written = [placement for placement in offloaded if needs_copy(placement, contents)]
    for placement in offloaded:
        index[placement.name] = _index_entry(placement.source, placement.dtype, placement.shape, contents)
        scales = scales_name(placement.source)
        if with_scales and scales in contents and contents.mapped_file(scales) is not None:
            stored = contents.dtype_and_shape(scales)
            assert stored is not None  # a safetensors file holds nothing but tensors
            index[scales_name(placement.name)] = _index_entry(scales, *stored, contents)
    if folder is not None and index:
        make_folder(folder)
        total = sum(placement.num_bytes for placement in written)
        with ByteProgress(total, "Writing weights", show_progress) as progress:
            for placement in written:
                weight = contents.tensor(placement.source).to(placement.dtype)
                index.pop(placement.name)
                offload_weight(weight, placement.name, folder, index)
                progress.advance(placement.num_bytes)
        save_offload_index(index, folder)
    return index


def _index_entry(
    source: str, dtype: torch.dtype, shape: Sequence[int], contents: CheckpointContents
) -> dict[str, object]:
    return {
        "safetensors_file": contents.mapped_file(source),
        "weight_name": source,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
    }


logger = logging.getLogger("accelerate.utils.modeling")

StrPath = str | os.PathLike[str]
FLAT = "FullyShardedDataParallel"  # FSDP1, whose flat parameters have other names and shapes


def load_state_dict(checkpoint_file: StrPath, device_map: DeviceMap | None = None) -> dict[str, torch.Tensor]:
    """The tensors of one weights file, by name.

    Args:
        checkpoint_file: A safetensors file, or one of `torch.save`, of which no code is run.
        device_map: Device by name of module or tensor; what it does not name, or leaves on disk, is in CPU memory.

    Returns:
        On the CPU, views of the mapped file: read when they are used, and free to be written to without changing it.

    Raises:
        ValueError: The file is damaged, was written for another framework, or holds code.
        OSError: It cannot be read.
    """
    shard = open_shard(checkpoint_file)
    if not device_map:
        return {name: shard.tensor(name) for name in shard.names()}
    devices = {name: device_of(name, device_map) for name in shard.names()}
    return {
        name: shard.tensor(name) if device == DISK else shard.tensor(name).to(device)
        for name, device in devices.items()
    }


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: StrPath,
    device_map: DeviceMap | None = None,
    offload_folder: StrPath | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> Index:
    """Load a checkpoint into a model, each tensor once and directly to its place.

    On the CPU, in the dtype of the checkpoint, parameters become views of the mapped files: they are read from the disk
    when they are first used, and training them leaves the files as they are. What goes on disk stays in the checkpoint if
    that is in the safetensors format. Nothing moves before names, shapes and places have been checked.

    Args:
        model: The model, with or without memory.
        checkpoint: A weights file, an index of shards, a folder that holds one of these, or the name of a repository of
            the Hugging Face Hub.
        device_map: Device by name of module or tensor, "disk" among them. When None, a model that has memory keeps it
            and gets the values; one that is (in part) on the meta device gets the checkpoint's tensors in CPU memory.
        offload_folder: Where what goes on disk is noted, and written if it cannot stay in the checkpoint.
        dtype (`torch.dtype`, *optional*): Of floating-point tensors, such as `torch.float16` or "float16"; as in the model
            when None.
        offload_state_dict (`bool`): Not used: nothing is read that would have to be put aside.
        offload_buffers (`bool`): Leave buffers on disk too where the map says so; else they are in CPU memory.
        keep_in_fp32_modules (`list[str]`, *optional*): Names of modules that stay in float32 when `dtype` is float16.
        offload_8bit_bnb (`bool`): Note the scales of 8-bit weights of bitsandbytes that are left on disk, too.
        strict (`bool`): Raise an error, not a warning, when the checkpoint has not exactly the names of the model.
        full_state_dict (`bool`): For a model that is sharded over processes: the checkpoint holds whole tensors.
        broadcast_from_rank0 (`bool`): Rank 0 reads the checkpoint, and broadcasts it to the others.

    Returns:
        Where the weights that are left on disk can be read, by name, as `dispatch_model` takes it in `offload_index`.
        Empty when there are none.

    Raises:
        ValueError: The checkpoint does not fit the model, is damaged or cannot be found; the map does not fit the model;
            or an `offload_folder` is needed. The model is as before.
        OSError: A file cannot be read, or the disk has no room. The model is as before.

    Example:
        ```python
        with init_empty_weights():
            model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 8))
        load_checkpoint_in_model(model, "my_model", device_map={"0": "cpu", "1": "disk"}, offload_folder="offloaded")
        ```
    """
    wished_dtype = None if dtype is None else as_dtype(dtype)
    if broadcast_from_rank0 or is_sharded(model):
        if device_map is not None:
            raise ValueError(
                "device_map cannot be combined with broadcast_from_rank0=True or a sharded model: leave out device_map, or "
                "broadcast_from_rank0 and sharding."
            )
        load_across_processes(model, checkpoint, wished_dtype, strict, full_state_dict, broadcast_from_rank0)
        return {}
    if isinstance(device_map, str):
        raise ValueError(
            f"device_map={device_map!r} is the name of a strategy: compute the map with infer_auto_device_map, or use "
            "load_checkpoint_and_dispatch."
        )
    if device_map is not None:
        check_places(device_map)
        check_device_map(model, device_map)
    contents = CheckpointContents(find_checkpoint(checkpoint))
    if device_map is None and customizes_loading(model):
        _load_through_model(model, contents, wished_dtype, strict)
        return {}
    compare(model, contents).check(strict)
    tied = find_tied_parameters(model)
    _warn_about_ties(model, tied, device_map)
    options = LoadOptions(device_map, wished_dtype, keep_in_fp32_modules or (), offload_buffers)
    placements = plan_placements(model, contents, options)
    check_memory(_bytes_by_device(placements))
    check_room(placements, contents, offload_folder)
    shown = os.environ.get("LOCAL_RANK", "0") == "0"
    index = leave_on_disk(placements, contents, offload_folder, offload_8bit_bnb, shown)
    load_tensors(model, contents, placements, shown)
    for name, module in extra_states(model).items():
        if name in contents:
            module.set_extra_state(contents.tensor(name))
    loaded = {placement.name for placement in placements}
    retie_parameters(model, [sorted(group, key=lambda name: name not in loaded) for group in tied])
    return index


def _bytes_by_device(placements: Iterable[Placement]) -> dict[torch.device, int]:
    """Memory to be allocated on each device; views of files are not counted, because the system can drop their pages."""
    needed: dict[torch.device, int] = {}
    for placement in placements:
        if not (placement.is_viewed or placement.in_place or placement.is_offloaded):
            needed[placement.device] = needed.get(placement.device, 0) + placement.num_bytes
    return needed


def _load_through_model(
    model: nn.Module, contents: CheckpointContents, dtype: torch.dtype | None, strict: bool
) -> None:
    assign = any(tensor.is_meta for tensor in expected_tensors(model).values())
    if dtype is not None and not assign:
        logger.warning(
            "Modules of %s copy the checkpoint into their own tensors, so dtype=%s has no effect: call model.to(dtype).",
            type(model).__name__,
            dtype,
        )
    state_dict = {name: convert(contents.tensor(name), dtype if assign else None) for name in contents}
    tied = find_tied_parameters(model)
    left = model.load_state_dict(state_dict, strict=strict, assign=assign)
    retie_parameters(model, tied)
    if left.missing_keys or left.unexpected_keys:
        Difference(contents.source, type(model).__name__, left.missing_keys, left.unexpected_keys, []).check(strict)


def _warn_about_ties(model: nn.Module, tied: list[list[str]], device_map: DeviceMap | None) -> None:
    if not tied and check_tied_parameters_in_config(model):
        logger.warning(
            "The config of %s ties weights, but they are not tied yet: call model.tie_weights() "
            "before planning a device map and loading.",
            type(model).__name__,
        )
    if device_map is not None:
        check_tied_parameters_on_same_device(tied, device_map)


# ---- sharded models, and loading on rank 0 only -----------------------------------------------------------------------


def is_sharded(model: nn.Module) -> bool:
    """Whether its parameters are sharded over ranks: DTensors, or flat parameters of FSDP1."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters()) or _is_flat(model)


def load_across_processes(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    dtype: torch.dtype | None,
    strict: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> None:
    """Load a checkpoint into a model on all ranks, on each its own shard.

    Args:
        model: The model, on every rank.
        checkpoint: As for `load_checkpoint_in_model`; read by rank 0 only where that broadcasts.
        dtype: Dtype of floating-point tensors; as stored when None.
        strict: Raise an error if names differ.
        full_state_dict: The checkpoint holds full tensors, not the shards of one rank.
        broadcast_from_rank0: Rank 0 reads the checkpoint, and broadcasts it to the others.

    Raises:
        RuntimeError: On all ranks, when rank 0 cannot read it, or without a process group.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if broadcast_from_rank0 and not dist.is_initialized():
        raise RuntimeError(
            "broadcast_from_rank0=True needs a process group: start the program with `accelerate launch` and create an "
            "Accelerator or PartialState first, or leave it out."
        )
    state_dict: dict[str, torch.Tensor] = {}
    problem: Exception | None = None
    if not broadcast_from_rank0 or dist.get_rank() == 0:
        try:
            state_dict = _read(model, checkpoint, dtype, strict)
        except Exception as error:
            problem = error
    if broadcast_from_rank0:
        reasons = [None if problem is None else f"{type(problem).__name__}: {problem}"]
        dist.broadcast_object_list(reasons, src=0)
        if problem is None and reasons[0] is not None:
            raise RuntimeError(f"Rank 0 could not load the checkpoint: {reasons[0]}")
    if problem is not None:
        raise problem
    options = StateDictOptions(
        full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0, strict=strict
    )
    set_model_state_dict(model, state_dict, options=options)  # type: ignore[arg-type]


def _read(
    model: nn.Module, checkpoint: str | os.PathLike[str], dtype: torch.dtype | None, strict: bool
) -> dict[str, torch.Tensor]:
    contents = CheckpointContents(find_checkpoint(checkpoint))
    if not _is_flat(model):
        compare(model, contents).check(strict)
    return {name: convert(contents.tensor(name), dtype) for name in contents}


def convert(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor converted to `dtype`, if it is a floating-point one."""
    if dtype is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.to(dtype)


def _is_flat(model: nn.Module) -> bool:
    return any(type(module).__name__ == FLAT for module in model.modules())
