"""Collectives over the data parallel group of Megatron-LM."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accel_ops.nested import recursively_apply


def data_parallel_group() -> Any:
    """Megatron's data parallel group, where it has made one; else None, for all ranks."""
    parallel_state: Any = sys.modules.get("megatron.core.parallel_state")  # not imported: there is no group
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return None
    return parallel_state.get_data_parallel_group()


def avg_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Average each loss over the data parallel group (an all-reduce).

    Args:
        losses: The losses of this rank, each with one element.

    Returns:
        The means, of shape `(len(losses),)`.
    """
    means = torch.cat([loss.detach().reshape(1) for loss in losses])
    if dist.is_initialized():
        group = data_parallel_group()
        dist.all_reduce(means, group=group)
        means /= dist.get_world_size(group)
    return means


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """All-gather tensors over the data parallel group, in rank order.

    Args:
        tensor (nested list/tuple/dictionary of `torch.Tensor`): Equal in shape on these ranks.

    Returns:
        The same structure, concatenated along the first dimension; a 0-dim tensor gets one.
    """

    def gather_one(value: torch.Tensor) -> torch.Tensor:
        value = value.reshape(1) if value.ndim == 0 else value.contiguous()
        if not dist.is_initialized():
            return value
        group = data_parallel_group()
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, value, group=group)
        return torch.cat(parts)

    return recursively_apply(gather_one, tensor, error_on_other_type=True)
