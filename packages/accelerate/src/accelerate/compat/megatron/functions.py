"""Functions of accelerate 1.15's module for Megatron-LM: collectives over its data parallel group, and steps of preparation that are gone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

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


def _needs_megatron(what: str) -> NotImplementedError:
    """The error for a step that accelerate 1.15 takes with the package megatron.training."""
    return NotImplementedError(
        f"{what} needs megatron.training, which this library does not use: models are trained with megatron-core alone. Pass "
        "model, optimizer, scheduler and data loader to Accelerator.prepare()."
    )


def initialize(accelerator: Any, extra_args_provider: Any = None, args_defaults: Any = None) -> None:
    """Raise NotImplementedError: this would start Megatron-LM."""
    raise _needs_megatron("initialize()")


def finish_mpu_init() -> None:
    """Make Megatron-LM's process groups."""
    raise _needs_megatron("finish_mpu_init()")


def model_provider_func(
    pre_process: bool = True, post_process: bool = True, add_encoder: bool = True, add_decoder: bool = True
) -> nn.Module:
    """This rank's stage of a model of Megatron-LM."""
    raise _needs_megatron("model_provider_func()")


def prepare_data_loader(accelerator: Any, dataloader: Any) -> Any:
    """A data loader for Megatron-LM."""
    raise _needs_megatron("prepare_data_loader()")


def prepare_model_optimizer_scheduler(accelerator: Any) -> Any:
    """Megatron-LM's model, optimizer and scheduler."""
    raise _needs_megatron("prepare_model_optimizer_scheduler()")


def prepare_optimizer(accelerator: Any, model: Any) -> Any:
    """An optimizer of Megatron-LM, wrapped."""
    raise _needs_megatron("prepare_optimizer()")


def prepare_scheduler(accelerator: Any, optimizer: Any, scheduler: Any) -> Any:
    """A scheduler of Megatron-LM, wrapped."""
    raise _needs_megatron("prepare_scheduler()")
