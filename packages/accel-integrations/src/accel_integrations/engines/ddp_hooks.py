"""Communication hooks: how `DistributedDataParallel` compresses gradients for the all-reduce."""

# Annotations are not postponed in this file: torch compares those of hooks with its types.

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel_state.enums import DDPCommunicationHookType
from accel_state.settings.ddp import HOOKS, WRAPPERS, DistributedDataParallelKwargs


def register_hook(replica: DistributedDataParallel, settings: DistributedDataParallelKwargs) -> None:
    """Register the chosen communication hook on a `DistributedDataParallel`."""
    if settings.comm_hook is not DDPCommunicationHookType.BATCHED_POWER_SGD:
        settings.register_comm_hook(replica)
        return
    hook: Any = batched_power_sgd
    if settings.comm_wrapper in WRAPPERS:
        hook = WRAPPERS[settings.comm_wrapper].load()(hook)
    replica.register_comm_hook(settings._power_sgd_state(), hook)


def batched_power_sgd(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PowerSGD on flat buckets rather than on each gradient: faster, and less exact.

    Stands in for `batched_powerSGD_hook` of torch 2.13, which fails at its first compressed step because it passes
    matrices to a function for batches of matrices.

    Args:
        state: A `PowerSGDState`.
        bucket: The bucket to all-reduce; it gets the averaged gradients.
    """
    power_sgd = HOOKS[DDPCommunicationHookType.POWER_SGD].load()
    if state.iter < state.start_powerSGD_iter:  # nothing is compressed yet
        future: torch.futures.Future[torch.Tensor] = power_sgd(state, bucket)
        return future
    gradients = bucket.buffer()

    def drop_padding(compressed: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        return gradients.copy_(compressed.value()[: len(gradients)])

    square: torch.futures.Future[torch.Tensor] = power_sgd(state, SquareBucket(bucket))
    return square.then(drop_padding)


class SquareBucket:
    """A bucket that pretends to hold one square matrix, padded with zeros.

    Args:
        bucket: The real one.
    """

    def __init__(self, bucket: Any) -> None:
        flat = bucket.buffer()
        self._side = math.ceil(math.sqrt(len(flat)))
        self._buffer = torch.nn.functional.pad(flat, (0, self._side**2 - len(flat)))
        self.index = bucket.index
        self.is_last = bucket.is_last

    def buffer(self) -> torch.Tensor:
        """All elements, 1-dim."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """The one square matrix, a view of the buffer."""
        return [self._buffer.view(self._side, self._side)]
