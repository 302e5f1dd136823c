"""The process group of one pipeline, and which rank holds which stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accel_integrations.parallel.pipeline.shapes import TensorShape
from accel_state.supervision import report_progress


@dataclass(frozen=True)
class PipelineGroup:
    """The process group of one pipeline, and which rank in it holds which stage.

    Attributes:
        process_group: The ranks of the pipeline.
        num_stages: How many stages they hold: rank r has the stages r, r + size, ...
        device: The device of this rank.
    """

    process_group: dist.ProcessGroup
    num_stages: int
    device: torch.device

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.process_group.size()

    @property
    def rank(self) -> int:
        """This process's rank in the pipeline."""
        return self.process_group.rank()

    @property
    def held(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return tuple(range(self.rank, self.num_stages, self.size))

    @property
    def last_rank(self) -> int:
        """The rank with the last stage."""
        return self.rank_of(self.num_stages - 1)

    def rank_of(self, stage: int) -> int:
        """The rank with a stage."""
        return stage % self.size

    def receive(self, shapes: Sequence[TensorShape], stage: int) -> list[torch.Tensor]:
        """Receive tensors from the rank with another stage; blocks until they have arrived."""
        report_progress()
        tensors = [shape.empty(self.device) for shape in shapes]
        for tensor in tensors:
            dist.recv(tensor, group=self.process_group, group_src=self.rank_of(stage))
        return tensors

    def send(self, tensors: Sequence[torch.Tensor], stage: int) -> list[Any]:
        """Send tensors to the rank with another stage; keep them alive until the returned work is done."""
        report_progress()
        return [dist.isend(tensor, group=self.process_group, group_dst=self.rank_of(stage)) for tensor in tensors]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Broadcast a tensor, in place."""
        dist.broadcast(tensor, group=self.process_group, group_src=source)

    def broadcast_object(self, value: Any, source: int) -> Any:
        """Broadcast a picklable object; returns that of the source."""
        box = [value]
        dist.broadcast_object_list(box, group=self.process_group, group_src=source, device=self.device)
        return box[0]
