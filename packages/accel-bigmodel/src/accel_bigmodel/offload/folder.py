"""A folder of offloaded weights: one raw file for each, with an index of dtypes and shapes.

The folder is a cache of weights that are also elsewhere, so nothing waits for the disk (fsync). After a power failure,
files that did not reach it have another size than the index says, and are rejected.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from accel_ops.files.durable import make_folder, write_atomically
from accel_ops.files.staging import path_inside

INDEX_NAME = "index.json"
Index = dict[str, dict[str, Any]]


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: str | os.PathLike[str], index: Index | None = None
) -> Index | None:
    """Write a weight into the folder, with an atomic rename and without waiting for the disk.

    Args:
        weight: The weight.
        weight_name: Its name; the file is called `<name>.dat`.
        offload_folder: The folder.
        index: Changed in place: its dtype and shape are added.

    Returns:
        `index`.

    Raises:
        ValueError: When the name leads out of the folder.
    """
    plain = weight.detach().to("cpu").contiguous()
    content: Any = (ctypes.c_ubyte * plain.nbytes).from_address(plain.data_ptr()) if plain.nbytes else b"\0"
    with write_atomically(path_inside(offload_folder, f"{weight_name}.dat"), durable=False) as file:
        file.write(content)
    if index is not None:
        index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    return index


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Memory-map a weight of the folder; writing to the tensor does not change the file.

    Args:
        weight_file: The file.
        weight_info: Its `dtype` and `shape`.

    Raises:
        ValueError: When the dtype or shape is invalid, or the file has another size.
        FileNotFoundError: When there is no such file.
    """
    check_entry(os.path.basename(weight_file).removesuffix(".dat"), weight_info, weight_file)
    dtype, shape = getattr(torch, weight_info["dtype"]), tuple(weight_info["shape"])
    needed = prod(shape) * dtype.itemsize
    if not needed:
        return torch.empty(shape, dtype=dtype)
    file_size = os.path.getsize(weight_file)
    if file_size != needed:
        raise ValueError(
            f"The offloaded weight {os.fspath(weight_file)!r} has {file_size} bytes, but {shape} of {dtype} take {needed}: "
            "it is truncated, or belongs to another model. Offload the model again."
        )
    return torch.from_file(os.fspath(weight_file), shared=False, size=prod(shape), dtype=dtype).view(shape)


def check_entry(name: str, entry: Any, source: str | os.PathLike[str]) -> None:
    """Raise an error for an index entry that does not say where and how a weight is stored.

    Args:
        name: Of the weight.
        entry: Should have `dtype`, the name of a torch dtype, and `shape`, a list of int; or `safetensors_file`.
        source: The index or file, for the error.

    Raises:
        ValueError: Naming what is wrong.
    """
    wrong = _problem_of(entry)
    if wrong:
        raise ValueError(
            f"The index of offloaded weights {os.fspath(source)!r} has {wrong} for {name!r}: it is damaged, or was not "
            "written for offloaded weights. Offload the model again."
        )


def _problem_of(entry: Any) -> str | None:
    if not isinstance(entry, Mapping):
        return f"{entry!r} instead of dtype and shape"
    if entry.get("safetensors_file") is not None:
        file = entry["safetensors_file"]
        return None if isinstance(file, str | os.PathLike) else f"the safetensors_file {file!r}, which is not a path,"
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or not isinstance(getattr(torch, dtype, None), torch.dtype):
        return f"the dtype {dtype!r}, which torch does not have," if "dtype" in entry else "no dtype"
    if not isinstance(shape, list | tuple) or not all(type(size) is int and size >= 0 for size in shape):
        return f"the shape {shape!r}, which is not a list of sizes," if "shape" in entry else "no shape"
    return None


def save_offload_index(index: Index, offload_folder: str | os.PathLike[str]) -> None:
    """Write the index of the folder; entries of other weights are kept.

    Args:
        index: Dtype and shape by name; nothing is written when it is empty.
        offload_folder: The folder.
    """
    if not index:
        return
    path = Path(offload_folder) / INDEX_NAME
    before = read_index(offload_folder) if path.is_file() else {}
    with write_atomically(path, durable=False) as file:
        file.write(json.dumps({**before, **index}, indent=2).encode())


def read_index(offload_folder: str | os.PathLike[str]) -> Index:
    """Read the index of a folder.

    Raw files lie in the folder. Safetensors files lie in it, too, where their path is relative; a checkpoint from which weights were
    left on disk keeps its place, and has an absolute path.

    Returns:
        The index, with absolute paths of safetensors files.

    Raises:
        FileNotFoundError: When there is none.
        ValueError: When it cannot be read, or a relative path leads out of the folder.
    """
    path = Path(offload_folder) / INDEX_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"There are no offloaded weights in {os.fspath(offload_folder)!r}: {INDEX_NAME} is missing."
        )
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is not an index of offloaded weights: {error}.") from None
    if not isinstance(index, dict):
        raise ValueError(f"{str(path)!r} is not an index of offloaded weights: it holds a {type(index).__name__}.")
    for name, entry in index.items():
        check_entry(name, entry, path)
        file = entry.get("safetensors_file")
        if file is not None and not os.path.isabs(file):
            entry["safetensors_file"] = str(path_inside(offload_folder, file))
    return index


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write all weights of a state dict into a folder, with their index.

    Args:
        save_dir: The folder; created if missing.
        state_dict: The weights by name, on any device.
    """
    make_folder(save_dir)
    index: Index = {}
    for name, weight in state_dict.items():
        offload_weight(weight, name, save_dir, index)
    save_offload_index(index, save_dir)
