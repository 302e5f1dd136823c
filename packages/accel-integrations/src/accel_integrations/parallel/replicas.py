"""Averages over data parallel replicas: of DTensor gradients, which DDP does not support, and of losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel_integrations.parallel.module_states import all_reduce_over_group, broadcast_to_group
from accel_ops.collectives.transport import collective_device
from accel_ops.modules import to_local
from accel_state.weak import Weak

BUCKET_BYTES = 25 * 2**20


class GradientAverager:
    """All-reduces gradients over a process group while the backward pass runs; parameters are not replaced.

    Gradients are all-reduced in buckets, in the same order on all ranks, each as soon as its gradients are computed. A
    bucket also counts the ranks that have each gradient, so that one which no rank has stays None.

    Args:
        model: Its parameters, DTensors or not, are broadcast from the first rank of the group first. Of a DTensor, every
            rank of the group must hold the same shard.
        group: The process group of the replicas.
        parameters: Those of the model that are replicas; None for all.
        bucket_bytes: Size of a bucket, in bytes.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Any,
        parameters: Sequence[nn.Parameter] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.group = group
        self.num_processes = dist.get_world_size(group)
        self.enabled = True
        parameters = list(model.parameters()) if parameters is None else parameters
        for tensor in chain(parameters, model.buffers()):
            broadcast_to_group(to_local(tensor), group)
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        self._buckets = list(_into_buckets(trainable[::-1], bucket_bytes))  # backward begins with the last
        self._bucket_of: dict[torch.Tensor, int] = {
            parameter: index for index, bucket in enumerate(self._buckets) for parameter in bucket
        }
        self._waiting: list[int] = []  # gradients that are still to come, per bucket; empty outside of backward
        self._sent: list[tuple[torch.Tensor, Any, list[bool]]] = []
        self._all_present: dict[Any, torch.Tensor] = {}  # by size and dtype of buckets, and device
        # A lambda: functions are not copied with a model.
        self._hooks = [model.register_forward_pre_hook(lambda *_: self._begin())]
        # the garbage collector does not see what hooks of parameters refer to; the model keeps this
        weak_self = Weak(self)
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(lambda parameter: weak_self.get()._arrived(parameter))
            for parameter in trainable
        ]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward passes all-reduce nothing."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def remove(self) -> None:
        """Remove the hooks: gradients are no longer averaged."""
        for hook in self._hooks:
            hook.remove()

    # ---- during backward ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Reset the state, in case an error has ended the last backward pass early."""
        self._waiting, self._sent = [], []

    def _arrived(self, parameter: torch.Tensor) -> None:
        if not self.enabled:
            return
        if not self._waiting:  # the first gradient of this backward
            self._waiting = [len(bucket) for bucket in self._buckets]
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._waiting[self._bucket_of[parameter]] -= 1
        while len(self._sent) < len(self._buckets) and self._waiting[len(self._sent)] == 0:
            self._send(self._buckets[len(self._sent)])

    def _send(self, bucket: list[nn.Parameter]) -> None:
        gradients = [_own_gradient(parameter) for parameter in bucket]
        device, dtype = collective_device(self.group), to_local(bucket[0]).dtype
        flat = [
            (torch.zeros_like(to_local(one)) if gradient is None else gradient).detach().to(device, dtype).flatten()
            for one, gradient in zip(bucket, gradients, strict=True)
        ]
        is_present = [gradient is not None for gradient in gradients]
        message = torch.cat([*flat, self._counts(is_present, dtype, device)]).div_(self.num_processes)
        self._sent.append((message, dist.all_reduce(message, group=self.group, async_op=True), is_present))

    def _counts(self, is_present: list[bool], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """1 for each gradient that this rank has, else 0, made without waiting for the device."""
        if not all(is_present):
            counts = torch.tensor(is_present, dtype=dtype, pin_memory=device.type == "cuda")
            return counts.to(device, non_blocking=True)
        key = len(is_present), dtype, device
        if key not in self._all_present:
            self._all_present[key] = torch.ones(len(is_present), dtype=dtype, device=device)
        return self._all_present[key]

    def _finish(self) -> None:
        """All-reduce what is left, and write the averages into the gradients."""
        self._waiting = []
        for bucket in self._buckets[len(self._sent) :]:
            self._send(bucket)
        sent, self._sent = self._sent, []
        for bucket, (message, work, is_present) in zip(self._buckets, sent, strict=True):
            work.wait()
            sizes = [to_local(parameter).numel() for parameter in bucket]
            *averages, present = message.split([*sizes, len(bucket)])
            # what this rank has is there; the host waits for the device only to learn of what others have
            counts = is_present if all(is_present) else present.tolist()
            for parameter, average, count in zip(bucket, averages, counts, strict=True):
                if count > 0:
                    _set_gradient(parameter, average)


def redistribute_gradients(model: nn.Module) -> None:
    """Have every gradient redistributed to the placements of its parameter; some come as `Partial` sums.

    Args:
        model: Its parameters must not be moved afterwards: they would lose what is registered here.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and to_local(parameter) is not parameter:
            parameter.register_post_accumulate_grad_hook(_distribute_gradient)


def _into_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Group parameters into buckets of one dtype, in order."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        local = to_local(parameter)
        if bucket and (size >= bucket_bytes or local.dtype != to_local(bucket[0]).dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += local.numel() * local.element_size()
    if bucket:
        yield bucket


def _own_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The local gradient of this rank's shard."""
    _distribute_gradient(parameter)
    return None if parameter.grad is None else to_local(parameter.grad)


def _distribute_gradient(parameter: torch.Tensor) -> None:
    placements = getattr(parameter, "placements", None)
    if parameter.grad is not None and getattr(parameter.grad, "placements", None) != placements:
        parameter.grad = parameter.grad.redistribute(placements=placements)  # type: ignore[attr-defined]


def _set_gradient(parameter: nn.Parameter, average: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    local = to_local(parameter.grad)
    local.copy_(average.view_as(local))


# ---- losses -------------------------------------------------------------------------------------------------------


def mean_over_tokens(loss: torch.Tensor, num_tokens: torch.Tensor | int, group: Any, size: int) -> torch.Tensor:
    """The mean loss over the tokens of all ranks, from each rank's own mean.

    Gradients are right where the engine averages them over the same ranks: what each contributes is weighted by its
    number of tokens. A rank may have no tokens; then its `loss` may be NaN, as the mean of nothing is.

    Args:
        loss: 0-dim, the mean over `num_tokens` tokens.
        num_tokens: How many tokens this rank's loss counts.
        group: The process group over which gradients are averaged; all ranks when None.
        size: The number of ranks over which gradients are averaged.

    Returns:
        0-dim, equal on all ranks.
    """
    count = torch.as_tensor(num_tokens, dtype=torch.float32, device=loss.device).detach()  # float16 ends at 65,504
    loss = torch.where(count > 0, loss, loss.nan_to_num() * 0)
    counted = torch.stack([count, loss.detach() * count])
    total, summed = all_reduce_over_group(counted, group).unbind()
    weighted = loss * (count * size / total.clamp(min=1)).to(loss.dtype)
    return weighted + ((summed / total.clamp(min=1)).to(loss.dtype) - weighted).detach()
