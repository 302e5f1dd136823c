"""Full state dicts of DTensor parameters, and back."""

from __future__ import annotations

from typing import Any

import torch

from accel_ops.modules import full_tensor, to_local
from accel_ops.tensor_files import id_tensor_storage


def whole_state_dict(state: dict[str, Any]) -> dict[str, Any]:
    """A model's state dict with every DTensor unsharded (full tensors); all ranks must call this.

    Args:
        state: Tied tensors share their memory, and do so in the result.
    """
    found: dict[Any, Any] = {}
    result = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or to_local(value) is value:
            result[name] = value
            continue
        key = id_tensor_storage(value), value.shape
        if key not in found:
            found[key] = full_tensor(value)
        result[name] = found[key]
    return result


def whole_optimizer_state(optimizer: Any) -> dict[str, Any]:
    """An optimizer's state dict with every DTensor unsharded (full tensors); all ranks must call this.

    Args:
        optimizer: A torch optimizer, or one around it.
    """
    state = optimizer.state_dict()
    values = {
        number: {name: full_tensor(value) for name, value in of_parameter.items()}
        for number, of_parameter in state["state"].items()
    }
    return {**state, "state": values}


def load_whole_optimizer_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Load a full optimizer state dict; each rank keeps its shards.

    Args:
        optimizer: A torch optimizer, or one around it.
        state: As of `whole_optimizer_state`; not changed.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    values = {
        number: {name: cut_like(value, parameters[number]) for name, value in of_parameter.items()}
        if number < len(parameters)
        else of_parameter
        for number, of_parameter in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": values})


def cut_like(value: Any, like: torch.Tensor) -> Any:
    """A full tensor, with the placements of a DTensor of its shape; anything else as it is.

    Args:
        value: Equal on all ranks.
        like: The other one.
    """
    if not isinstance(value, torch.Tensor) or to_local(like) is like or value.shape != like.shape:
        return value
    if to_local(value) is not value:
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(value, mesh, placements, src_data_rank=None)
