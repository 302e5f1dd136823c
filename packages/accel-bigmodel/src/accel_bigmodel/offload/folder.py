"""A folder of raw weights, one file for each, with an index: where weights go that no checkpoint file holds as they are."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from accel_ops.durable import make_folder, write_atomically
from accel_ops.staging import path_inside

INDEX_NAME = "index.json"
Index = dict[str, dict[str, Any]]


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: str | os.PathLike[str], index: Index | None = None
) -> Index | None:
    """Write a weight into the folder.

    Args:
        weight: The weight.
        weight_name: Its name; the file is called `<name>.dat`.
        offload_folder: The folder.
        index: Where its dtype and shape are noted.

    Returns:
        `index`.

    Raises:
        ValueError: When the name leads out of the folder.
    """
    plain = weight.detach().to("cpu").contiguous()
    content: Any = (ctypes.c_ubyte * plain.nbytes).from_address(plain.data_ptr()) if plain.nbytes else b"\0"
    with write_atomically(path_inside(offload_folder, f"{weight_name}.dat")) as file:
        file.write(content)
    if index is not None:
        index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    return index


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Map a weight of the folder into memory; writing to the tensor leaves the file as it is.

    Args:
        weight_file: The file.
        weight_info: Its `dtype` and `shape`.

    Raises:
        ValueError: When the file has another size than that.
    """
    dtype, shape = _dtype(weight_info["dtype"], weight_file), tuple(weight_info["shape"])
    needed = prod(shape) * dtype.itemsize
    if not needed:
        return torch.empty(shape, dtype=dtype)
    found = os.path.getsize(weight_file)
    if found != needed:
        raise ValueError(
            f"The offloaded weight {os.fspath(weight_file)!r} has {found} bytes, but {shape} of {dtype} take {needed}: "
            "it was not written to the end, or belongs to another model. Offload the model again."
        )
    return torch.from_file(os.fspath(weight_file), shared=False, size=prod(shape), dtype=dtype).view(shape)


def _dtype(name: str, weight_file: str | os.PathLike[str]) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"The index of {os.fspath(weight_file)!r} names the dtype {name!r}, which torch has not.")
    return found


def save_offload_index(index: Index, offload_folder: str | os.PathLike[str]) -> None:
    """Write the index of the folder; what it has on other weights already is kept.

    Args:
        index: Dtype and shape by name; nothing is written when it is empty.
        offload_folder: The folder.
    """
    if not index:
        return
    path = Path(offload_folder) / INDEX_NAME
    before = read_index(offload_folder) if path.is_file() else {}
    with write_atomically(path) as file:
        file.write(json.dumps({**before, **index}, indent=2).encode())


def read_index(offload_folder: str | os.PathLike[str]) -> Index:
    """Read the index of a folder.

    Raises:
        FileNotFoundError: When there is none.
        ValueError: When it cannot be read.
    """
    path = Path(offload_folder) / INDEX_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"There are no offloaded weights in {os.fspath(offload_folder)!r}: {INDEX_NAME} is missing."
        )
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no index of offloaded weights: {error}.") from None
    if not isinstance(index, dict):
        raise ValueError(f"{str(path)!r} is no index of offloaded weights: it holds a {type(index).__name__}.")
    return index


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write all weights of a state dict into a folder, with their index.

    Args:
        save_dir: The folder; it is made if need be.
        state_dict: The weights.
    """
    make_folder(save_dir)
    index: Index = {}
    for name, weight in state_dict.items():
        offload_weight(weight, name, save_dir, index)
    save_offload_index(index, save_dir)
