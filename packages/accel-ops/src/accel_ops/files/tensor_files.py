"""Tensors on disk in the safetensors format, and tensors of a model that share storage."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.files.mapped import MappedShard
from accel_ops.files.safetensors_header import DTYPE_NAMES, encode_header
from accel_ops.tied import find_shared_names

if TYPE_CHECKING:
    from typing import Protocol

    class Writable(Protocol):
        """Something that takes bytes."""

        def write(self, data: Any, /) -> Any:
            """Append a buffer."""
            ...


logger = logging.getLogger("accelerate.utils.other")


def clean_state_dict_for_safetensors(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict that a safetensors file can hold: every tensor once and contiguous.

    Of tied weights the first name is kept. Loading into a model with the same ties restores all of them.

    Args:
        state_dict: Name to tensor of any shape, dtype and device.

    Returns:
        A new dictionary. Tensors that needed no copy are the given ones.
    """
    dropped = [name for names in find_shared_names(state_dict) for name in names[1:]]
    if dropped:
        logger.warning(
            "Removed shared tensors from the saved state dict, because each is written once: %s. A model that ties them has "
            "all of them after loading.",
            ", ".join(sorted(dropped)),
        )
    left_out = frozenset(dropped)
    return {
        name: tensor.contiguous() if isinstance(tensor, torch.Tensor) else tensor
        for name, tensor in state_dict.items()
        if name not in left_out
    }


def check_tensors(tensors: Mapping[str, Any]) -> None:
    """Raise an error for values that a safetensors file cannot hold.

    Raises:
        TypeError: Naming the entry and its type, layout or dtype.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"A safetensors file holds a dict of tensors, not a {type(tensors).__name__}: pass a state dict, or save with "
            "safe_serialization=False"
        )
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"The tensor name {name!r} is not a str, which a safetensors file needs: rename it")
        problem = None
        if not isinstance(tensor, torch.Tensor):
            problem = f"is a {type(tensor).__name__}"
        elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            problem = f"is a {type(tensor).__name__} without plain memory"
        elif tensor.layout is not torch.strided:
            problem = f"has the layout {tensor.layout}"
        elif tensor.is_quantized or tensor.dtype not in DTYPE_NAMES:
            problem = f"has the dtype {tensor.dtype}"
        elif tensor.is_meta:
            problem = "is on the meta device, without values"
        if problem:
            raise TypeError(
                f"{name!r} {problem}, which a safetensors file cannot hold: convert it to a dense tensor, leave it out, or "
                "save with safe_serialization=False"
            )


def write_tensors(file: Writable, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, one tensor at a time, so that at most one is copied to CPU memory.

    Written here rather than by the library because that can write only to a path: it could be neither checksummed on
    the way nor waited for.

    Args:
        file: A binary file that is written from the first to the last byte.
        tensors: Name to tensor of any shape and device.
        metadata: Strings for the header.

    Raises:
        TypeError: As `check_tensors`.
    """
    check_tensors(tensors)
    header, places = file_layout(tensors, metadata)
    file.write(header)
    for name in places:
        tensor = tensors[name].detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        if num_bytes := _num_bytes(tensor):
            file.write((ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr()))


def file_layout(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The layout of a safetensors file.

    Args:
        tensors: Name to tensor, of dtypes that the format has; a DTensor counts with its full shape.
        metadata: Strings for the header.

    Returns:
        The header, and the position of each tensor's first byte in the file, in the order of the file.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that all stay aligned
    described = [
        (name, DTYPE_NAMES[tensors[name].dtype], tensors[name].shape, _num_bytes(tensors[name])) for name in order
    ]
    header = encode_header(described, metadata)
    begins = accumulate((num_bytes for *_, num_bytes in described), initial=len(header))
    return header, dict(zip(order, begins, strict=False))


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def read_tensors(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
    """Read a safetensors file.

    On the CPU the tensors are views of the memory-mapped file: copy them into a model before the file may change.

    Raises:
        ValueError: The file is damaged or not a safetensors file.
        OSError: It cannot be read.
    """
    shard = MappedShard(path)
    return {name: shard.tensor(name).to(device) for name in shard.names()}
