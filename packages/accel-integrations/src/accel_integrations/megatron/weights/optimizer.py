"""The program's own optimizer on shards: its steps, with clipping, and its state as of a run of one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_integrations.gradients import scale_to_norm_
from accel_integrations.megatron.core import load
from accel_integrations.megatron.weights.layouts import Weight, rows_of, stack_rows, tensor_name
from accel_integrations.megatron.weights.loss_scale import ShardedLossScale
from accel_integrations.megatron.weights.sharded import Held, ShardedWeights


class ShardedOptimizer:
    """The program's optimizer, with this rank's shards in place of the tensors for which it was made.

    Args:
        optimizer: Any optimizer of torch; changed in place.
        names: The names of the tensors in each of its groups.
        weights: The weights of the model.
        shares_states: Whether each replica updates some of the parameters only, and sends them to the others.
        loss_scale: By which the losses were multiplied.

    Attributes:
        skipped: Whether the last step was not taken, because gradients were inf or NaN.

    Raises:
        ValueError: Tensors that are one parameter in megatron-core are in different groups.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Sequence[Sequence[str]],
        weights: ShardedWeights,
        shares_states: bool,
        loss_scale: ShardedLossScale,
    ) -> None:
        self.optimizer = optimizer
        self.skipped = False
        self.loss_scale = loss_scale
        self.names = [list(group) for group in names]
        self._weights = weights
        self._parallel = load("parallel_state")
        group_of = {name: index for index, group in enumerate(names) for name in group}
        self._has_experts = any(weight.is_expert for weight in weights.weights)
        self._owners = self._share(shares_states)
        data_rank = self._parallel.get_data_parallel_rank(with_context_parallel=True)
        members: list[list[nn.Parameter]] = [[] for _ in names]
        self.held: dict[str, Held] = {}
        for name, held_weight in weights.held.items():
            groups = {group_of.get(tensor_name(source)) for source in held_weight.weight.sources}
            if len(groups) > 1:
                raise ValueError(
                    f"{', '.join(held_weight.weight.sources)} are in different parameter groups of the optimizer, but are one "
                    "parameter in Megatron-LM. Put them into one group."
                )
            index = groups.pop()
            if index is not None and self._owners.get(name, data_rank) == data_rank:
                members[index].append(held_weight.stored)
                self.held[name] = held_weight
        for group, parameters in zip(optimizer.param_groups, members, strict=True):
            group["params"] = parameters

    def _share(self, shares_states: bool) -> dict[str, int]:
        """Which replica updates which parameter: the largest first, each to the one with the least.

        Experts are left out: all replicas that have one update it.
        """
        count = self._parallel.get_data_parallel_world_size(with_context_parallel=True)
        if not shares_states or count == 1:
            return {}
        load_of, owners = [0] * count, {}
        shared = [
            (name, held_weight) for name, held_weight in self._weights.held.items() if not held_weight.weight.is_expert
        ]
        for name, held_weight in sorted(shared, key=lambda item: (-item[1].stored.numel(), item[0])):
            owners[name] = load_of.index(min(load_of))
            load_of[owners[name]] += held_weight.stored.numel()
        return owners

    # ---- stepping ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, max_norm: float) -> Tensor:
        """Clip the gradients in `main_grad`, and take a step, unless the loss scale made them inf or NaN.

        Args:
            max_norm: The largest norm of all gradients; 0 for any.

        Returns:
            The norm before clipping, over all ranks (0-dim float32).
        """
        gradients = self._gradients()
        self.loss_scale.unscale_(gradients)
        norm = self._norm()
        self.skipped = not self.loss_scale.update(norm)
        if self.skipped:
            return norm
        if max_norm > 0:
            scale_to_norm_(gradients, norm, max_norm)
        for held_weight in self.held.values():
            if held_weight.parameter.requires_grad:
                held_weight.stored.grad = held_weight.parameter.main_grad.to(held_weight.stored.dtype)  # type: ignore[attr-defined]
        with torch.enable_grad():
            self.optimizer.step()
        for held_weight in self.held.values():
            held_weight.stored.grad = None
        self._send()
        for held_weight in self._weights.held.values():
            if held_weight.stored is not held_weight.parameter:
                held_weight.parameter.copy_(held_weight.stored)
        return norm

    def _gradients(self) -> list[Tensor]:
        trained = (
            held_weight.parameter for held_weight in self._weights.held.values() if held_weight.parameter.requires_grad
        )
        return [parameter.main_grad for parameter in trained]  # type: ignore[attr-defined]

    def _norm(self) -> Tensor:
        """The norm of all gradients: each counts once, whatever the number of ranks that hold it."""
        weights = [
            held_weight
            for held_weight in self._weights.held.values()
            if held_weight.parameter.requires_grad and self._weights.counts_here(held_weight)
        ]
        device = next(iter(self._weights.held.values())).parameter.device
        total = _square([held_weight for held_weight in weights if not held_weight.weight.is_expert], device)
        dist.all_reduce(total, group=self._parallel.get_model_parallel_group())
        if self._has_experts:
            of_experts = _square([held_weight for held_weight in weights if held_weight.weight.is_expert], device)
            dist.all_reduce(of_experts, group=self._parallel.get_expert_tensor_model_pipeline_parallel_group())
            total += of_experts
        return total.sqrt()

    def _send(self) -> None:
        """Send the updated parameters to the other replicas."""
        group = self._parallel.get_data_parallel_group(with_context_parallel=True)
        for name, owner in self._owners.items():
            dist.broadcast(self._weights.held[name].stored.data, dist.get_global_rank(group, owner), group=group)


def _square(members: Sequence[Held], device: torch.device) -> Tensor:
    """The square of the norm of gradients (0-dim float32)."""
    squares = [held_weight.parameter.main_grad.float().square().sum() for held_weight in members]  # type: ignore[attr-defined]
    return torch.stack(squares).sum() if squares else torch.zeros((), device=device)


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
    states = {
        name: state[held_weight.stored] for name, held_weight in sharded.held.items() if held_weight.stored in state
    }
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, {name: _told(state, sharded.held[name]) for name, state in states.items()})
    descriptions = {name: told_of for of_rank in reversed(told) for name, told_of in of_rank.items()}
    number_of = {name: number for number, name in enumerate(name for names in sharded.names for name in names)}
    entries: dict[int, dict[str, Any]] = {}
    for key in dict.fromkeys(key for description in descriptions.values() for key in description):
        shards = {
            name: held_weight[key] for name, held_weight in states.items() if descriptions[name].get(key) == (SHARD,)
        }
        parts: dict[str, Tensor] = {}
        for weight, full in weights.gather(shards):
            if keep:
                split = (part.detach().to("cpu", copy=True).contiguous() for part in weight.layout.split(full))
                parts.update(zip(weight.sources, split, strict=True))
        for name, value in [*stack_rows(parts).items(), *_small_values(weights, descriptions, key)]:
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
    weight_of = {held_weight.stored: held_weight.weight for held_weight in sharded.held.values()}
    parameters = [parameter for group in sharded.optimizer.param_groups for parameter in group["params"]]
    entries = (_own_entry(weights, weight_of[parameter], state["state"], number_of) for parameter in parameters)
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
