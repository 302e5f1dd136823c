"""The state of a sharded optimizer as of a run of one process, gathered from all ranks and cut up again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from accel_integrations.engines.megatron.optimizing import ShardedOptimizer
from accel_integrations.engines.megatron.shape import Weight
from accel_integrations.engines.megatron.sources import rows_of, tensor_name, whole
from accel_integrations.engines.megatron.weights import Held, ShardedWeights

SHARD = "shard"
"""Stands for a tensor of the parameter's shape where ranks tell each other what they have."""


def full_optimizer_state(sharded: ShardedOptimizer, weights: ShardedWeights, keep: bool) -> dict[str, Any]:
    """The state dict of an optimizer as of one process; all ranks call this.

    Args:
        sharded: The optimizer.
        weights: The weights of its model.
        keep: Whether this rank needs it; if not, the result is empty.

    Raises:
        ValueError: The optimizer keeps tensors of other shapes than its parameters, as Adafactor does.
    """
    state = sharded.optimizer.state
    states = {name: state[one.stored] for name, one in sharded.held.items() if one.stored in state}
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, {name: _told(one, sharded.held[name]) for name, one in states.items()})
    descriptions = {name: told_of for one in reversed(told) for name, told_of in one.items()}
    number_of = {name: number for number, name in enumerate(name for names in sharded.names for name in names)}
    entries: dict[int, dict[str, Any]] = {}
    for key in dict.fromkeys(key for one in descriptions.values() for key in one):
        shards = {name: one[key] for name, one in states.items() if descriptions[name].get(key) == (SHARD,)}
        parts: dict[str, Tensor] = {}
        for weight, full in weights.gather(shards):
            if keep:
                split = (part.detach().to("cpu", copy=True).contiguous() for part in weight.layout.split(full))
                parts.update(zip(weight.sources, split, strict=True))
        for name, value in [*whole(parts).items(), *_small_values(weights, descriptions, key)]:
            entries.setdefault(number_of[name], {})[key] = value
    return {"state": dict(sorted(entries.items())), "param_groups": _groups(sharded)} if keep else {}


def _told(state: Mapping[str, Any], held: Held) -> dict[str, Any]:
    """What other ranks must know: small values themselves, each in a tuple, and where there are shards."""
    return {key: _told_of(key, value, held) for key, value in state.items()}


def _told_of(key: str, value: Any, held: Held) -> tuple[Any, ...]:
    if not isinstance(value, Tensor):
        return ("value", value)
    if value.ndim == 0:
        return ("value", value.cpu())
    if value.shape == held.stored.shape:
        return (SHARD,)
    raise ValueError(
        f"The optimizer's state {key!r} of {held.weight.name} has the shape {tuple(value.shape)}, but the shard of the "
        f"parameter has {tuple(held.stored.shape)}. Only states of the parameter's shape can be stored under Megatron-LM: "
        "use an optimizer such as AdamW or SGD."
    )


def _small_values(weights: ShardedWeights, descriptions: Mapping[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    for weight in weights.weights:
        told = descriptions.get(weight.name, {}).get(key, (SHARD,))
        if told != (SHARD,):
            for source in weight.sources:  # each its own copy: an optimizer counts its steps in place
                yield tensor_name(source), told[1].clone() if isinstance(told[1], Tensor) else told[1]


def _groups(sharded: ShardedOptimizer) -> list[dict[str, Any]]:
    groups, first = [], 0
    for group, names in zip(sharded.optimizer.param_groups, sharded.names, strict=True):
        numbers = list(range(first, first + len(names)))
        groups.append({**_options(group), "params": numbers})
        first += len(names)
    return groups


def own_optimizer_state(
    sharded: ShardedOptimizer, weights: ShardedWeights, state: Mapping[str, Any]
) -> dict[str, Any]:
    """The part of a state dict of one process that belongs to this rank's shards.

    Raises:
        ValueError: It is that of an optimizer with other groups.
    """
    saved = [group["params"] for group in state["param_groups"]]
    counts, group_sizes = [len(numbers) for numbers in saved], [len(names) for names in sharded.names]
    if counts != group_sizes:
        raise ValueError(
            f"The state is that of an optimizer with {counts} parameters in its groups, but this one has {group_sizes}. Create "
            "the same groups as when it was saved."
        )
    number_of = {
        name: number
        for names, numbers in zip(sharded.names, saved, strict=True)
        for name, number in zip(names, numbers, strict=True)
    }
    weight_of = {one.stored: one.weight for one in sharded.held.values()}
    parameters = [parameter for group in sharded.optimizer.param_groups for parameter in group["params"]]
    entries = (_own_entry(weights, weight_of[one], state["state"], number_of) for one in parameters)
    groups, first = [], 0
    for group, stored in zip(sharded.optimizer.param_groups, state["param_groups"], strict=True):
        numbers = list(range(first, first + len(group["params"])))
        groups.append({**_options(stored), "params": numbers})
        first += len(numbers)
    return {"state": {number: entry for number, entry in enumerate(entries) if entry}, "param_groups": groups}


def _own_entry(
    weights: ShardedWeights, weight: Weight, states: Mapping[Any, Any], number_of: Mapping[str, int]
) -> dict[str, Any]:
    stored = [(source, states.get(number_of[tensor_name(source)])) for source in weight.sources]
    if any(state is None for _, state in stored):
        return {}
    parts = [(source, state) for source, state in stored if state is not None]
    entry: dict[str, Any] = {}
    for key, value in parts[0][1].items():
        if isinstance(value, Tensor) and value.ndim:
            entry[key] = weights.shard(weight, [rows_of(source, state[key]) for source, state in parts]).contiguous()
        else:  # experts have one state, but each counts its steps in place
            entry[key] = value.clone() if isinstance(value, Tensor) else value
    return entry


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
