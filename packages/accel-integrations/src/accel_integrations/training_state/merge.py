"""Merging the sharded weights of FSDP into a model folder."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from accel_bigmodel.weights.write import SAFETENSORS, TORCH, FolderFormat, parse_size, write_shards
from accel_integrations.training_state.formats.shards import ShardedModel, StoredTensor, find_sharded_folder
from accel_ops.files.durable import DurableFile
from accel_ops.files.safetensors_header import DTYPE_NAMES, encode_header
from accel_ops.files.serialization import serialize
from accel_state.processes import PartialState

MAX_SHARD_SIZE = "5GB"

logger = logging.getLogger("accelerate.utils.fsdp_utils")


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merge the weights that FSDP saved with `SHARDED_STATE_DICT` into a model folder that loads anywhere.

    Tensors are read and written one after the other, so that little more than the largest one is in memory
    (`pytorch_model.bin`: one file of at most 5 GB). Above 5 GB the weights are spread over several files with an index.
    The new files are renamed into the folder together, after fsync. Only the main process merges; the others wait.

    Args:
        checkpoint_dir: The folder with `.metadata` and the `.distcp` files, usually `pytorch_model_fsdp_0`, or the
            checkpoint that holds exactly one.
        output_path: The folder for the merged weights; created if missing. Other files in it are kept.
        safe_serialization: Write `model.safetensors` rather than `pytorch_model.bin`.
        remove_checkpoint_dir: Remove the sharded weights after the merged ones are written.

    Raises:
        FileNotFoundError: There is no sharded checkpoint, or one of its files is missing.
        ValueError: The checkpoint is damaged or not to be trusted, or holds no model.
        TypeError: It holds a dtype that safetensors does not know.
        OSError: A file cannot be read or written, or there is not enough disk space; nothing was written then.

    Example:
        ```python
        merge_fsdp_weights("checkpoint_0/pytorch_model_fsdp_0", "merged")
        ```
    """
    state = PartialState()
    try:
        if state.is_main_process:
            folder = find_sharded_folder(checkpoint_dir)
            if remove_checkpoint_dir and Path(output_path).resolve().is_relative_to(folder.resolve()):
                raise ValueError(
                    f"The output {os.fspath(output_path)!r} is inside the checkpoint folder that would be removed. "
                    "Choose another output folder."
                )
            write_merged(ShardedModel(folder), output_path, SAFETENSORS if safe_serialization else TORCH)
            if remove_checkpoint_dir:
                shutil.rmtree(folder.resolve())
    finally:
        state.wait_for_everyone()


def write_merged(
    model: ShardedModel,
    folder: str | os.PathLike[str],
    form: FolderFormat,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> list[str]:
    """Write a sharded model as a model folder, in place of an earlier one in the same format.

    Args:
        model: The sharded model.
        folder: The output folder; created if missing.
        form: The names and the format of its files.
        max_shard_size: Limit of one weights file, in bytes or a str such as `"5GB"`.

    Returns:
        The names of the files written, the index last.

    Raises:
        TypeError: A tensor has a dtype that safetensors does not know.
        ValueError: The checkpoint is damaged.
        OSError: A file cannot be read or written; the files in the folder are not changed then.
    """
    if form.is_safetensors:
        _check_dtypes(model.tensors)
        if model.objects:
            logger.warning("A safetensors file holds only tensors; left out: %s", ", ".join(sorted(model.objects)))
    shards = _split(model.tensors, parse_size(max_shard_size))
    num_bytes = sum(tensor.num_bytes for tensor in model.tensors.values())
    _check_room(folder, num_bytes)

    def write(file: DurableFile, names: list[str]) -> None:
        if form.is_safetensors:
            _write_safetensors(file, model, names)
        else:
            _write_torch(file, model, names, with_objects=names is shards[0])

    return write_shards(folder, form, form.name_shards(shards), num_bytes, write)


def _write_safetensors(file: DurableFile, model: ShardedModel, names: list[str]) -> None:
    """Write the header, then each tensor as soon as it is read."""
    # The widest dtypes come first, so that all tensors are aligned.
    order = sorted(names, key=lambda name: (-model.tensors[name].dtype.itemsize, name))
    described = [(name, model.tensors[name]) for name in order]
    file.write(
        encode_header(
            ((name, DTYPE_NAMES[tensor.dtype], tensor.shape, tensor.num_bytes) for name, tensor in described),
            {"format": "pt"},
        )
    )
    for name in order:
        values = model.read_tensor(name)
        if num_bytes := model.tensors[name].num_bytes:
            file.write((ctypes.c_ubyte * num_bytes).from_address(values.data_ptr()))
        if file.error is not None:  # the disk is full: do not read the rest
            return


def _write_torch(file: DurableFile, model: ShardedModel, names: list[str], *, with_objects: bool) -> None:
    """Write one file as `torch.save` does, which needs all its tensors at once."""
    content: dict[str, object] = {name: model.read_tensor(name) for name in names}
    if with_objects:
        content |= {name: model.read_object(name) for name in model.objects}
    serialize(content, file, False)


def _split(tensors: Mapping[str, StoredTensor], max_shard_bytes: int) -> list[list[str]]:
    """Distribute tensors over files, in order; a tensor above the limit gets a file of its own."""
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, tensor in tensors.items():
        if tensor.num_bytes > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= tensor.num_bytes
    return shards


def _check_dtypes(tensors: Mapping[str, StoredTensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(
                f"{name!r} has the dtype {tensor.dtype}, which a safetensors file cannot hold. Write pytorch_model.bin "
                "instead, with safe_serialization=False or --unsafe_serialization."
            )


def _check_room(folder: str | os.PathLike[str], num_bytes: int) -> None:
    """Check the free disk space before anything is written."""
    parent = Path(folder).resolve()
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if num_bytes > free:
        raise OSError(
            errno.ENOSPC,
            f"Not enough disk space: {num_bytes} bytes are needed, {free} are free. Choose another disk or free some "
            "space",
            str(folder),
        )
