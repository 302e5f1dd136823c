"""Gradients of a pipeline: what several stages or several copies of it have to agree on before a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from accel_integrations.parallel.pipeline_run import PipelineGroup
from accel_ops.modules import full_tensor, to_local

BUCKET_BYTES = 25 * 2**20


class GradientExchange:
    """Adds up gradients of parameters that several stages hold, and averages all gradients over the copies.

    Args:
        line: The stages' processes.
        shared: Parameters that several processes hold, by name, with these processes.
        own: Parameters of this process, by name.
        copies: Processes that hold the same stages in other copies of the model; None when there are none.
    """

    def __init__(
        self,
        line: PipelineGroup,
        shared: Mapping[str, tuple[int, ...]],
        own: Mapping[str, torch.Tensor],
        copies: Any = None,
    ) -> None:
        self._line = line
        self._shared = [(own[name], ranks) for name, ranks in shared.items() if line.rank in ranks]
        self._own = own
        self._copies = copies
        self.is_pending = False
        """Whether there are gradients that were not exchanged."""

    def note_backward(self) -> None:
        """There are new gradients."""
        self.is_pending = True

    def finish(self) -> None:
        """Exchange gradients, once for a window."""
        if not self.is_pending:
            return
        self.is_pending = False
        for parameter, ranks in self._shared:
            if parameter.requires_grad:
                self._add_up(parameter, ranks)
        if self._copies is not None:
            self._average()

    def _add_up(self, parameter: torch.Tensor, ranks: Sequence[int]) -> None:
        """Sum a gradient over the processes that hold the parameter, in the same order on all of them."""
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        mine = to_local(own).contiguous()
        others = {rank: torch.empty_like(mine) for rank in ranks if rank != self._line.rank}
        operations = [
            dist.P2POp(operation, tensor, group=self._line.group, group_peer=rank)
            for rank, other in others.items()
            for operation, tensor in ((dist.isend, mine), (dist.irecv, other))
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        total = torch.zeros_like(mine)
        for rank in ranks:
            total += mine if rank == self._line.rank else others[rank]
        if parameter.grad is None:
            parameter.grad = own
        to_local(parameter.grad).copy_(total)

    def _average(self) -> None:
        """Average over the copies, in buckets; a gradient that no copy has stays None.

        Those of distributed parameters are averaged already.
        """
        parameters = [one for one in self._own.values() if one.requires_grad and to_local(one) is one]
        if not parameters:
            return
        present = torch.tensor(
            [parameter.grad is not None for parameter in parameters], dtype=torch.uint8, device=self._line.device
        )
        dist.all_reduce(present, dist.ReduceOp.MAX, group=self._copies)
        gradients = []
        for parameter, is_there in zip(parameters, present.tolist(), strict=True):
            if is_there:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(to_local(parameter.grad))
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat, group=self._copies)
            flat /= self._copies.size()
            for gradient, average in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                gradient.copy_(average.view_as(gradient))


def make_equal(line: PipelineGroup, shared: Mapping[str, tuple[int, ...]], own: Mapping[str, torch.Tensor]) -> None:
    """Give parameters that several stages hold the values of the first of them.

    Args:
        line: The stages' processes.
        shared: Their names, with the processes that hold them.
        own: Parameters of this process, by name.
    """
    with torch.no_grad():
        for name, ranks in shared.items():
            if line.rank not in ranks:
                continue
            mine = own[name].detach().contiguous()
            if line.rank == ranks[0]:
                for rank in ranks[1:]:
                    dist.send(mine, group=line.group, group_dst=rank)
            else:
                dist.recv(mine, group=line.group, group_src=ranks[0])
                own[name].copy_(mine)


def _buckets(gradients: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    found: list[list[torch.Tensor]] = []
    open_buckets: dict[torch.dtype, tuple[list[torch.Tensor], int]] = {}
    for gradient in gradients:
        bucket, size = open_buckets.get(gradient.dtype, ([], BUCKET_BYTES))
        if size >= BUCKET_BYTES:
            bucket, size = [], 0
            found.append(bucket)
        bucket.append(gradient)
        open_buckets[gradient.dtype] = bucket, size + gradient.nbytes
    return found


def clip_over_stages(
    parameters: Sequence[torch.Tensor],
    counted_elsewhere: set[int],
    max_norm: float,
    norm_type: float,
    line: PipelineGroup,
) -> torch.Tensor:
    """Scale gradients of all stages so that their joint norm is at most `max_norm`.

    Args:
        parameters: Of this process.
        counted_elsewhere: Ids of those whose gradient another process counts.
        max_norm: The bound.
        norm_type: Which norm; `math.inf` for the largest element.
        line: The stages' processes, all of which must call this.

    Returns:
        The norm before, 0-dim, the same on all processes.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    counted = [one.grad for one in parameters if one.grad is not None and id(one) not in counted_elsewhere]
    norms = [
        full_tensor(torch.linalg.vector_norm(gradient.detach().float(), norm_type)).to(line.device)
        for gradient in counted
    ]
    stacked = torch.stack(norms) if norms else torch.zeros(1, device=line.device)
    if math.isinf(norm_type):
        total = stacked.max()
        dist.all_reduce(total, dist.ReduceOp.MAX, group=line.group)
    else:
        total = (stacked**norm_type).sum()
        dist.all_reduce(total, group=line.group)
        total = total ** (1.0 / norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        part = to_local(gradient)
        part.mul_(factor.to(part.device, part.dtype))
    return total
