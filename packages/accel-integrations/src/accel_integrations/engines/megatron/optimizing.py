"""Taking the steps of the program's own optimizer on shards: rebinding, gradients, clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_integrations.engines.megatron.library import load
from accel_integrations.engines.megatron.precision import ShardedLossScale
from accel_integrations.engines.megatron.sources import tensor_name
from accel_integrations.engines.megatron.weights import Held, ShardedWeights
from accel_integrations.gradients import scale_to_norm_


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
        place = self._parallel.get_data_parallel_rank(with_context_parallel=True)
        members: list[list[nn.Parameter]] = [[] for _ in names]
        self.held: dict[str, Held] = {}
        for name, one in weights.held.items():
            groups = {group_of.get(tensor_name(source)) for source in one.weight.sources}
            if len(groups) > 1:
                raise ValueError(
                    f"{', '.join(one.weight.sources)} are in different parameter groups of the optimizer, but are one "
                    "parameter in Megatron-LM. Put them into one group."
                )
            index = groups.pop()
            if index is not None and self._owners.get(name, place) == place:
                members[index].append(one.stored)
                self.held[name] = one
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
        shared = [(name, one) for name, one in self._weights.held.items() if not one.weight.is_expert]
        for name, one in sorted(shared, key=lambda item: (-item[1].stored.numel(), item[0])):
            owners[name] = load_of.index(min(load_of))
            load_of[owners[name]] += one.stored.numel()
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
        for one in self.held.values():
            if one.parameter.requires_grad:
                one.stored.grad = one.parameter.main_grad.to(one.stored.dtype)  # type: ignore[attr-defined]
        with torch.enable_grad():
            self.optimizer.step()
        for one in self.held.values():
            one.stored.grad = None
        self._send()
        for one in self._weights.held.values():
            if one.stored is not one.parameter:
                one.parameter.copy_(one.stored)
        return norm

    def _gradients(self) -> list[Tensor]:
        trained = (one.parameter for one in self._weights.held.values() if one.parameter.requires_grad)
        return [parameter.main_grad for parameter in trained]  # type: ignore[attr-defined]

    def _norm(self) -> Tensor:
        """The norm of all gradients: each counts once, whatever the number of ranks that hold it."""
        weights = [
            one
            for one in self._weights.held.values()
            if one.parameter.requires_grad and self._weights.counts_here(one)
        ]
        device = next(iter(self._weights.held.values())).parameter.device
        total = _square([one for one in weights if not one.weight.is_expert], device)
        dist.all_reduce(total, group=self._parallel.get_model_parallel_group())
        if self._has_experts:
            of_experts = _square([one for one in weights if one.weight.is_expert], device)
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
    squares = [one.parameter.main_grad.float().square().sum() for one in members]  # type: ignore[attr-defined]
    return torch.stack(squares).sum() if squares else torch.zeros((), device=device)
