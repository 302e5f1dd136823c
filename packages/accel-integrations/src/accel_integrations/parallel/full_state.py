"""Full state dicts of models and optimizers with DTensors, and loading them."""

from __future__ import annotations

from typing import Any

import torch

from accel_integrations.parallel.own_storage import keep_own_storage
from accel_ops.modules import full_tensor, to_local
from accel_ops.tensor_files import id_tensor_storage


def unshard_state_dict(state: dict[str, Any]) -> dict[str, Any]:
    """A model's state dict with every DTensor unsharded (full tensors); all ranks must call this.

    Args:
        state: The state dict; tied tensors share memory in the result, too.
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


def unshard_optimizer_state(optimizer: Any) -> dict[str, Any]:
    """An optimizer's state dict with every DTensor unsharded (full tensors); all ranks must call this.

    Args:
        optimizer: A torch optimizer, or a wrapper of one.
    """
    state = optimizer.state_dict()
    values = {
        number: {name: full_tensor(value) for name, value in of_parameter.items()}
        for number, of_parameter in state["state"].items()
    }
    return {**state, "state": values}


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
    """
    if not isinstance(value, torch.Tensor) or to_local(like) is like or value.shape != like.shape:
        return value
    if to_local(value) is not value:
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return keep_own_storage(distribute_tensor(value, mesh, placements, src_data_rank=None))
