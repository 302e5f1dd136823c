"""Writing a model folder: one weights file, or shards of a limited size with an index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from accel_ops.files.durable import DurableFile
from accel_ops.files.filenames import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME,
)
from accel_ops.files.serialization import check_loadable, serialize
from accel_ops.files.staging import StagedFolder
from accel_ops.files.tensor_files import check_tensors, clean_state_dict_for_safetensors
from accel_ops.tied import id_tensor_storage

UNIT_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class FolderFormat:
    """How one kind of model folder names its files."""

    weights_name: str
    pattern: str
    index_name: str
    is_safetensors: bool

    def owns(self, name: str) -> bool:
        """True for the names that a save in this format may have left in a folder."""
        before, after = (re.escape(part) for part in self.pattern.split("{suffix}"))
        shard = re.fullmatch(rf"{before}-\d{{5,}}-of-\d{{5,}}{after}", name)
        return name in (self.weights_name, self.index_name) or shard is not None

    def name_shards(self, shards: list[list[str]]) -> dict[str, list[str]]:
        """The files for shards, with the names of the tensors in each."""
        if len(shards) == 1:
            return {self.weights_name: shards[0]}
        count = len(shards)
        return {self.pattern.format(suffix=f"-{i:05d}-of-{count:05d}"): names for i, names in enumerate(shards, 1)}


SAFETENSORS = FolderFormat(SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_PATTERN_NAME, SAFE_WEIGHTS_INDEX_NAME, True)
TORCH = FolderFormat(WEIGHTS_NAME, WEIGHTS_PATTERN_NAME, WEIGHTS_INDEX_NAME, False)


def parse_size(size: int | str) -> int:
    """A size in bytes.

    Args:
        size: A number of bytes, or a str such as `"10GB"`, `"1.5 MB"`; units are powers of 1,000.

    Raises:
        ValueError: The str is not a size, or the size is not positive.
        TypeError: It is neither an int nor a str.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f"{size!r} is not a size: use a number of bytes or a str like '10GB'")
    if isinstance(size, int):
        num_bytes = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]B)\s*", size.upper())
        if match is None:
            raise ValueError(f"{size!r} is not a size: write a number with KB, MB, GB or TB, such as '10GB'")
        num_bytes = int(float(match[1]) * UNIT_BYTES[match[2]])
    if num_bytes < 1:
        raise ValueError(f"The size {size!r} is less than one byte: use a larger one")
    return num_bytes


def split_into_shards(state_dict: Mapping[str, torch.Tensor], max_shard_bytes: int) -> list[list[str]]:
    """Distribute tensors over shards, in their order.

    Tensors that share storage are put in one shard and count once. A tensor larger than the limit has a shard of its own.

    Args:
        state_dict: Name to tensor of any shape, dtype and device.
        max_shard_bytes: Limit of the tensors of one shard, in bytes.

    Returns:
        The names in each shard; one empty shard for an empty dict.
    """
    groups: dict[object, list[str]] = {}
    for name, tensor in state_dict.items():
        groups.setdefault(id_tensor_storage(tensor) if _num_bytes(tensor) else name, []).append(name)
    shards: list[list[str]] = []
    current: list[str] = []
    current_bytes = 0
    for names in groups.values():
        num_bytes = max(_num_bytes(state_dict[name]) for name in names)
        if num_bytes > max_shard_bytes:
            shards.append(names)
            continue
        if current and current_bytes + num_bytes > max_shard_bytes:
            shards.append(current)
            current, current_bytes = [], 0
        current = [*current, *names]
        current_bytes += num_bytes
    return [*shards, current] if current or not shards else shards


def write_model_folder(
    state_dict: Mapping[str, torch.Tensor],
    folder: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> list[str]:
    """Write a model's tensors as a model folder, replacing an earlier one in the same format.

    The new files appear only when all of them are complete and on the disk. Other files in the folder are kept.
    Tied weights are saved once in the safetensors format, and keep all their names in torch's.

    Args:
        state_dict: Name to tensor of any shape, dtype and device.
        folder: The folder; created if missing.
        max_shard_size: Limit of one weights file, a number of bytes or a str such as `"10GB"`.
        safe_serialization: Write safetensors files rather than torch's own.

    Returns:
        The names of the files written, the index last.

    Raises:
        NotADirectoryError: `folder` is a file.
        ValueError: The size cannot be read.
        TypeError: Something in `state_dict` cannot be saved in this format.
        OSError: A file could not be written; the earlier files are unchanged.

    Example:
        ```python
        write_model_folder(model.state_dict(), "my_model", max_shard_size="2GB")
        ```
    """
    max_shard_bytes = parse_size(max_shard_size)
    form = SAFETENSORS if safe_serialization else TORCH
    if form.is_safetensors:
        check_tensors(state_dict)
        state_dict = clean_state_dict_for_safetensors(state_dict)
    else:
        check_loadable(
            {name: value for name, value in state_dict.items() if not isinstance(value, torch.Tensor)},
            "The state dict",
        )

    def write(file: DurableFile, names: list[str]) -> None:
        serialize({name: state_dict[name] for name in names}, file, form.is_safetensors)

    shards = split_into_shards(state_dict, max_shard_bytes)
    return write_shards(folder, form, form.name_shards(shards), count_bytes(state_dict), write)


def write_shards(
    folder: str | os.PathLike[str],
    form: FolderFormat,
    shards: Mapping[str, list[str]],
    num_bytes: int,
    write: Callable[[DurableFile, list[str]], None],
) -> list[str]:
    """Write a model folder, replacing an earlier one in the same format; its files appear when all are on the disk.

    Args:
        folder: The folder; created if missing.
        form: The names of its files.
        shards: The files, with the names of the tensors in each.
        num_bytes: Of all tensors.
        write: Writes the tensors of one file.

    Returns:
        The names of the files written, the index last.
    """
    file_names = list(shards)
    staged = StagedFolder(folder)
    try:
        for file_name, names in shards.items():
            with DurableFile(staged.path / file_name) as file:
                write(file, names)
        if len(shards) > 1:
            with DurableFile(staged.path / form.index_name) as file:
                file.write(index_content(shards, num_bytes))
            file_names = [*file_names, form.index_name]
        publish_folder(staged, form, file_names[-1])
    except BaseException:
        staged.discard()
        raise
    return file_names


def publish_folder(staged: StagedFolder, form: FolderFormat, last: str) -> None:
    """Publish a model folder in place of an earlier one in the same format.

    Args:
        staged: Holds the new files.
        form: Their format.
        last: The file that appears last, where they have to be moved one by one.
    """
    present = os.listdir(staged.target) if staged.target.is_dir() else []
    staged.publish(replaces=[name for name in present if form.owns(name)], last=last)


def index_content(shards: Mapping[str, list[str]], num_bytes: int) -> bytes:
    """The index of a model folder with several files.

    Args:
        shards: From `FolderFormat.name_shards`.
        num_bytes: Of all tensors.
    """
    index = {
        "metadata": {"total_size": num_bytes},
        "weight_map": {name: file_name for file_name, names in shards.items() for name in names},
    }
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def count_bytes(state_dict: Mapping[str, torch.Tensor]) -> int:
    """The bytes of all tensors; those that share storage count once."""
    tensors = [value for value in state_dict.values() if _num_bytes(value)]
    return sum({id_tensor_storage(tensor): _num_bytes(tensor) for tensor in tensors}.values())


def _num_bytes(value: Any) -> int:
    """The bytes of a tensor; 0 for anything else, which a module's `get_extra_state` may have put into its state dict."""
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
