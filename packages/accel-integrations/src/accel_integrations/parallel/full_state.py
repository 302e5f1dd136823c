"""Full state dicts of models and optimizers with DTensors, and loading them."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from accel_ops.modules import full_tensor, to_local


def gathered(tensor: Any, keep: bool) -> Any:
    """The full tensor of a DTensor in CPU memory; others as they are. All ranks of its mesh must call this.

    Args:
        tensor: A DTensor, or anything else.
        keep: Whether this rank needs it. One that does not takes part in the all-gather and gets None.
    """
    if not isinstance(tensor, torch.Tensor) or to_local(tensor) is tensor:
        return tensor if keep else None
    full = full_tensor(tensor)
    return full.detach().cpu() if keep else None


def unshard_state_dict(state: dict[str, Any], keep: bool = True) -> dict[str, Any]:
    """A model's state dict with full tensors in place of DTensors, gathered one at a time; all ranks must call this.

    Args:
        state: The state dict; tied tensors share memory in the result, too.
        keep: Whether this rank needs the result.

    Returns:
        The state dict, with gathered tensors in CPU memory and others as they are. With DTensors and without `keep`, an
        empty dict.
    """
    full_tensors: dict[Any, Any] = {}
    result = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or to_local(value) is value:
            result[name] = value
            continue
        # Not by address: all ranks must leave out the same, and empty shards all have the same one.
        shard = to_local(value)
        key = StorageWeakRef(shard.untyped_storage()), shard.storage_offset(), value.shape
        if key not in full_tensors:
            full_tensors[key] = gathered(value, keep)
        result[name] = full_tensors[key]
    return result if keep or not full_tensors else {}


def unshard_optimizer_state(optimizer: Any, keep: bool = True) -> dict[str, Any]:
    """An optimizer's state dict with full tensors in place of DTensors; as `unshard_state_dict`.

    Args:
        optimizer: A torch optimizer, or a wrapper of one.
        keep: Whether this rank needs the result; an empty dict otherwise.
    """
    state = optimizer.state_dict()
    values = {
        number: {name: gathered(value, keep) for name, value in of_parameter.items()}
        for number, of_parameter in state["state"].items()
    }
    return {**state, "state": values} if keep else {}


def load_full_optimizer_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Load a full optimizer state dict; each rank keeps its shards.

    Args:
        optimizer: A torch optimizer, or a wrapper of one.
        state: What `unshard_optimizer_state` returned; not changed.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    values = {
        number: {name: distribute_like(value, parameters[number]) for name, value in of_parameter.items()}
        if number < len(parameters)
        else of_parameter
        for number, of_parameter in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": values})


def distribute_like(value: Any, like: torch.Tensor) -> Any:
    """Distribute a full tensor with the mesh and placements of a DTensor; return anything else as it is.

    Args:
        value: A full tensor, equal on all ranks.
        like: A parameter; a DTensor of the same shape gives the placements.

    Returns:
        A DTensor whose local shard, with memory of its own, is on the device of `value`: nothing is allocated on the
        mesh's devices.
    """
    if not isinstance(value, torch.Tensor) or to_local(like) is like or value.shape != like.shape:
        return value
    if to_local(value) is not value:
        return value
    shard: Any = torch.empty_like(like, dtype=value.dtype, device=value.device, requires_grad=False)
    for chunk in shard.__create_chunk_list__():
        window = tuple(slice(a, a + size) for a, size in zip(chunk.offsets, chunk.sizes, strict=True))
        to_local(shard).copy_(value.detach()[window])
    return shard
