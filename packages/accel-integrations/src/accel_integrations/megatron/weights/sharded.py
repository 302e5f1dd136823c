"""A model's tensors by their Hugging Face names, in this rank's shards: loading them, and gathering them again.

Any tensors with the shapes of parameters are treated in the same way: weights, and the states of optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_integrations.megatron.core import load
from accel_integrations.megatron.weights.layouts import Weight, rows_of, stack_rows, tensor_name


@dataclass(frozen=True)
class Held:
    """A parameter that this rank holds.

    Args:
        weight: What it consists of.
        parameter: megatron-core's parameter, a shard.
        stored: What optimizers update and checkpoints store: the parameter, or a copy in the model's own dtype.
    """

    weight: Weight
    parameter: nn.Parameter
    stored: nn.Parameter

    @torch.no_grad()
    def assign(self, shard: Tensor) -> None:
        """Set the values."""
        self.stored.copy_(shard)
        self.parameter.copy_(self.stored)


class ShardedWeights:
    """The weights of a model over all ranks.

    Args:
        weights: All parameters of the model.
        own: Those of this rank, by name.
        dtype: The dtype in which weights are stored.

    Raises:
        RuntimeError: megatron-core has built a parameter that is not in the list.
    """

    def __init__(self, weights: Sequence[Weight], own: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
        parallel = load("parallel_state")
        self.rank: int = parallel.get_tensor_model_parallel_rank()
        self._place = (self.rank, parallel.get_tensor_model_parallel_world_size())
        self._place_of_experts = (
            parallel.get_expert_tensor_parallel_rank(),
            parallel.get_expert_tensor_parallel_world_size(),
        )
        by_name = {weight.name: weight for weight in weights}
        if unknown := sorted(set(own) - set(by_name)):
            raise RuntimeError(
                f"megatron-core has the parameter {unknown[0]!r}, which no weight of the model maps to."
            )
        self.held = {
            name: Held(by_name[name], parameter, _stored(parameter, dtype)) for name, parameter in own.items()
        }
        self.dtype = dtype
        self.listed = list(weights)
        self.weights = [weight for weight in weights if not _is_second(weight, weights)]
        self.sources = [source for weight in self.weights for source in weight.sources]

    # ---- single parameters ------------------------------------------------------------------------------------------

    def shard(self, weight: Weight, parts: Sequence[Tensor]) -> Tensor:
        """This rank's shard of the tensors of one parameter."""
        return weight.layout.shard(weight.layout.join(parts), *self.place(weight))

    def place(self, weight: Weight) -> tuple[int, int]:
        """Which shard of a parameter this rank has, and of how many."""
        return self._place_of_experts if weight.is_expert else self._place

    def by_source(self) -> dict[str, Held]:
        """The parameter that holds a tensor of the model, by that tensor's name; other ranks may hold it alone."""
        holders = {}
        for one in reversed(self.held.values()):
            holders.update(dict.fromkeys(one.weight.sources, one))
        return holders

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy weights into this rank's shards.

        Args:
            tensors: Full tensors by the names of the model; names that no parameter has are passed over, and so are
                parameters without tensors.

        Raises:
            ValueError: A shard has another shape than the parameter.
        """
        for one in self.held.values():
            if all(tensor_name(source) in tensors for source in one.weight.sources):
                shard = self.shard(
                    one.weight, [rows_of(source, tensors[tensor_name(source)]) for source in one.weight.sources]
                )
                if shard.shape != one.stored.shape:
                    raise ValueError(
                        f"{one.weight.name} has the shape {tuple(one.stored.shape)}, but its part of "
                        f"{', '.join(one.weight.sources)} has {tuple(shard.shape)}. Let custom_model_provider_function build a "
                        "model of the sizes of the one that is prepared."
                    )
                one.assign(shard)

    def frozen(self, trained: Callable[[str], bool]) -> None:
        """Freeze parameters whose tensors are frozen in the model.

        Raises:
            ValueError: Some tensors of one parameter are frozen, and others are not.
        """
        for one in self.held.values():
            kinds = {trained(tensor_name(source)) for source in one.weight.sources}
            if len(kinds) > 1:
                raise ValueError(
                    f"Of {', '.join(one.weight.sources)}, which Megatron-LM keeps in one parameter, some are frozen and "
                    "others are not. Freeze all or none of them."
                )
            one.parameter.requires_grad_(kinds.pop())

    def counts_here(self, one: Held) -> bool:
        """Whether a parameter counts on this rank where ranks add something up: each counts once.

        Experts are added up by the ranks that share them out among each other, the others by those of a replica.
        """
        is_part = one.weight.layout.dim is not None or one.weight.is_expert
        return one.weight in self.weights and (is_part or self.rank == 0)

    # ---- all ranks --------------------------------------------------------------------------------------------------

    def full(self, keep: bool) -> dict[str, Tensor]:
        """All weights by the names of the model, in CPU memory; all ranks call this.

        Args:
            keep: Whether this rank needs them; if not, the result is empty.
        """
        shards = {name: one.stored.detach() for name, one in self.held.items()}
        tensors: dict[str, Tensor] = {}
        for weight, full in self.gather(shards):
            if keep:
                tensors.update(zip(weight.sources, map(_in_memory, weight.layout.split(full)), strict=True))
        return stack_rows(tensors)

    def gather(self, own: Mapping[str, Tensor]) -> Iterator[tuple[Weight, Tensor]]:
        """One full tensor after the other; all ranks call this, and go through all of them.

        Args:
            own: This rank's shards, by the name of the parameter; each shard is held by one rank at least.

        Yields:
            The parameter, and its full tensor on this rank's device. Parameters that no rank has are left out.
        """
        shard_of = {name: self.place(one.weight)[0] for name, one in self.held.items()}
        place = {name: (shard_of[name], value.dtype, tuple(value.shape)) for name, value in own.items()}
        places: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(places, place)
        device = next(iter(self.held.values())).parameter.device
        for weight in self.weights:
            shards = []
            for rank in range(self.place(weight)[1]):
                owner = next((one for one, at in enumerate(places) if at.get(weight.name, (None,))[0] == rank), None)
                if owner is None:
                    continue
                _, dtype, shape = places[owner][weight.name]
                mine = owner == dist.get_rank()
                shard = own[weight.name].contiguous() if mine else torch.empty(shape, dtype=dtype, device=device)
                if len(places) > 1:
                    dist.broadcast(shard, owner)
                shards.append(shard)
            if shards:
                yield weight, weight.layout.unshard(shards)


def _stored(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    if parameter.dtype == dtype:
        return parameter
    return nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)


def _is_second(weight: Weight, weights: Sequence[Weight]) -> bool:
    """Whether another parameter before this one holds the same tensors, as with tied embeddings."""
    return next(one for one in weights if one.sources == weight.sources) is not weight


def _in_memory(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
