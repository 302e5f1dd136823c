"""Communication hooks: how replicas compress gradients on their way between processes."""

# Annotations are not postponed in this file: torch compares those of hooks with its types.

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel_state.enums import DDPCommunicationHookType
from accel_state.settings.ddp import HOOKS, WRAPPERS, DistributedDataParallelKwargs


def register_hook(replica: DistributedDataParallel, settings: DistributedDataParallelKwargs) -> None:
    """Have a replica exchange its gradients through the chosen hook."""
    if settings.comm_hook is not DDPCommunicationHookType.BATCHED_POWER_SGD:
        settings.register_comm_hook(replica)
        return
    hook: Any = batched_power_sgd
    if settings.comm_wrapper in WRAPPERS:
        hook = WRAPPERS[settings.comm_wrapper].load()(hook)
    replica.register_comm_hook(settings._power_sgd_state(), hook)


def batched_power_sgd(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PowerSGD on whole buckets rather than on each gradient by itself: faster, and less exact.

    Stands in for `batched_powerSGD_hook` of torch 2.13, which fails at its first compressed step because it hands
    matrices to a function for batches of matrices.

    Args:
        state: A `PowerSGDState`.
        bucket: Gets the averaged gradients.
    """
    power_sgd = HOOKS[DDPCommunicationHookType.POWER_SGD].load()
    if state.iter < state.start_powerSGD_iter:  # nothing is compressed yet
        future: torch.futures.Future[torch.Tensor] = power_sgd(state, bucket)
        return future
    gradients = bucket.buffer()

    def cut(compressed: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        return gradients.copy_(compressed.value()[: len(gradients)])

    square: torch.futures.Future[torch.Tensor] = power_sgd(state, SquareBucket(bucket))
    return square.then(cut)


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
        """All elements, in one dimension."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """The matrix, which shares the buffer's memory."""
        return [self._buffer.view(self._side, self._side)]
