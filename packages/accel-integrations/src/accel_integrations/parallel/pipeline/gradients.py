"""Gradients of a pipeline: what stages and replicas have to all-reduce before an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from accel_integrations.gradients import GradientGroup, group_gradients, joint_norm, scale_to_norm_
from accel_integrations.parallel.pipeline.group import PipelineGroup
from accel_integrations.parallel.wire import as_sent
from accel_ops.modules import to_local

BUCKET_BYTES = 25 * 2**20


class GradientSync:
    """Sums gradients of parameters that several stages hold, and averages all gradients over the replicas.

    Args:
        group: The pipeline group.
        shared: Parameters that several ranks hold, by name, with these ranks.
        own: Parameters of this rank, by name.
        replicas: Process group of the ranks that hold the same stages in other replicas; None when there are none.
    """

    def __init__(
        self,
        group: PipelineGroup,
        shared: Mapping[str, tuple[int, ...]],
        own: Mapping[str, torch.Tensor],
        replicas: Any = None,
    ) -> None:
        self._group = group
        self._shared = [(own[name], ranks) for name, ranks in shared.items() if group.rank in ranks]
        self._own = own
        self._replicas = replicas
        self.is_pending = False
        """Whether there are gradients that were not summed and averaged yet."""

    def note_backward(self) -> None:
        """Called after each backward pass: there are new gradients."""
        self.is_pending = True

    def finish(self) -> None:
        """Sum and average gradients, once per gradient accumulation window."""
        if not self.is_pending:
            return
        self.is_pending = False
        for parameter, ranks in self._shared:
            if parameter.requires_grad:
                self._sum_shared(parameter, ranks)
        if self._replicas is not None:
            self._average_over_replicas()

    def _sum_shared(self, parameter: torch.Tensor, ranks: Sequence[int]) -> None:
        """Sum a gradient over the ranks that hold the parameter, in the same order on all of them."""
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        mine = to_local(gradient).contiguous()
        others = {rank: torch.empty_like(mine) for rank in ranks if rank != self._group.rank}
        operations = [
            dist.P2POp(operation, tensor, group=self._group.process_group, group_peer=rank)
            for rank, other in others.items()
            for operation, tensor in ((dist.isend, as_sent(mine)), (dist.irecv, as_sent(other)))
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        total = torch.zeros_like(mine)
        for rank in ranks:
            total += mine if rank == self._group.rank else others[rank]
        if parameter.grad is None:
            parameter.grad = gradient
        to_local(parameter.grad).copy_(total)

    def _average_over_replicas(self) -> None:
        """All-reduce in buckets; a gradient that no replica has stays None.

        Those of sharded parameters (DTensors) are averaged already.
        """
        parameters = [weight for weight in self._own.values() if weight.requires_grad and to_local(weight) is weight]
        if not parameters:
            return
        present = torch.tensor(
            [parameter.grad is not None for parameter in parameters], dtype=torch.uint8, device=self._group.device
        )
        dist.all_reduce(present, dist.ReduceOp.MAX, group=self._replicas)
        gradients = []
        for parameter, is_there in zip(parameters, present.tolist(), strict=True):
            if is_there:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(to_local(parameter.grad))
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat, group=self._replicas)
            flat /= self._replicas.size()
            for gradient, average in zip(bucket, flat.split([weight.numel() for weight in bucket]), strict=True):
                gradient.copy_(average.view_as(gradient))


def sync_shared_parameters(
    group: PipelineGroup, shared: Mapping[str, tuple[int, ...]], own: Mapping[str, torch.Tensor]
) -> None:
    """Send parameters that several stages hold from the first of these ranks to the others.

    Args:
        group: The pipeline group.
        shared: Their names, with the ranks that hold them.
        own: Parameters of this rank, by name.
    """
    with torch.no_grad():
        for name, ranks in shared.items():
            if group.rank not in ranks:
                continue
            mine = own[name].detach().contiguous()
            if group.rank == ranks[0]:
                for rank in ranks[1:]:
                    dist.send(as_sent(mine), group=group.process_group, group_dst=rank)
            else:
                dist.recv(as_sent(mine), group=group.process_group, group_src=ranks[0])
                own[name].copy_(mine)


def _buckets(gradients: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    buckets: list[list[torch.Tensor]] = []
    open_buckets: dict[torch.dtype, tuple[list[torch.Tensor], int]] = {}
    for gradient in gradients:
        bucket, size = open_buckets.get(gradient.dtype, ([], BUCKET_BYTES))
        if size >= BUCKET_BYTES:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(gradient)
        open_buckets[gradient.dtype] = bucket, size + gradient.nbytes
    return buckets


def clip_over_stages(
    parameters: Sequence[torch.Tensor],
    counted_elsewhere: set[int],
    max_norm: float,
    norm_type: float,
    group: PipelineGroup,
    only_finite: bool = False,
) -> torch.Tensor:
    """Clip gradients so that their norm over all stages is at most `max_norm`.

    Args:
        parameters: Of this rank.
        counted_elsewhere: Ids of those whose gradient another rank counts in the norm.
        max_norm: The largest norm allowed.
        norm_type: Which norm; `math.inf` for the largest element.
        group: The pipeline group, all ranks of which must call this.
        only_finite: Leave gradients as they are where their norm is inf or NaN.

    Returns:
        The gradient norm before clipping, 0-dim, the same on all ranks.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    counted = [weight.grad for weight in parameters if weight.grad is not None and id(weight) not in counted_elsewhere]
    local_norm = joint_norm(group_gradients(counted), norm_type)
    # the norm of the ranks' norms: of a rank without gradients it is 0
    total = joint_norm([GradientGroup([local_norm.view(1).to(group.device)], (group.process_group,))], norm_type)
    scale_to_norm_([to_local(gradient) for gradient in gradients], total, max_norm, only_finite)
    return total
