"""One batch on its way through the stages: all forwards, then, once the loss is known, all backwards (GPipe)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accel_integrations.parallel.pipeline_batch import Microbatches, share_gradients
from accel_integrations.parallel.pipeline_shapes import Structure, TensorShape
from accel_integrations.parallel.pipeline_stage import StagedModel
from accel_state.supervision import report_progress


@dataclass(frozen=True)
class PipelineGroup:
    """The processes of one pipeline, and where the stages are among them.

    Attributes:
        group: The processes.
        num_stages: How many stages they hold: process r has the stages r, r + size, ...
        device: Where this process computes.
    """

    group: dist.ProcessGroup
    num_stages: int
    device: torch.device

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """Which of them this one is."""
        return self.group.rank()

    @property
    def held(self) -> tuple[int, ...]:
        """The stages of this process."""
        return tuple(range(self.rank, self.num_stages, self.size))

    @property
    def last_rank(self) -> int:
        """The process with the last stage."""
        return self.rank_of(self.num_stages - 1)

    def rank_of(self, stage: int) -> int:
        """The process with a stage."""
        return stage % self.size

    def receive(self, shapes: Sequence[TensorShape], stage: int) -> list[torch.Tensor]:
        """Wait for tensors from the process with another stage."""
        report_progress()
        tensors = [shape.empty(self.device) for shape in shapes]
        for tensor in tensors:
            dist.recv(tensor, group=self.group, group_src=self.rank_of(stage))
        return tensors

    def send(self, tensors: Sequence[torch.Tensor], stage: int) -> list[Any]:
        """Begin to send tensors to the process with another stage; they must live until the returned work is done."""
        report_progress()
        return [
            dist.isend(tensor, group=self.group, group_dst=self.rank_of(stage)) for tensor in tensors
        ]  # work objects

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Have all processes get what the tensor holds on one of them."""
        dist.broadcast(tensor, group=self.group, group_src=source)

    def broadcast_object(self, value: Any, source: int) -> Any:
        """Have all processes get a plain object that one of them has."""
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=source, device=self.device)
        return box[0]


class Run:
    """One batch. Its backward runs once.

    Args:
        line: The processes.
        staged: The stages held here.
        structures: What the modules return for a microbatch of this batch.
        batch: The microbatches.
    """

    def __init__(
        self, line: PipelineGroup, staged: StagedModel, structures: dict[str, list[Structure]], batch: Microbatches
    ) -> None:
        self.line = line
        self.staged = staged
        self.structures = structures
        self.batch = batch
        self._kept: dict[tuple[int, int], tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]] | None = {}

    def forward(self) -> list[tuple[torch.Tensor, ...]]:
        """Run all forwards; returns the model's output for each microbatch where the last stage is, else nothing."""
        line, sent, results = self.line, [], []
        with_grad = torch.is_grad_enabled()
        self.staged.structures = self.structures
        assert self._kept is not None
        for index, (args, kwargs) in enumerate(self.batch.parts):
            for stage in line.held:
                received = line.receive(self._shapes(stage - 1), stage - 1) if stage else []
                if with_grad:
                    for tensor, shape in zip(received, self._shapes(stage - 1) if stage else (), strict=True):
                        tensor.requires_grad_(shape.needs_grad)
                outputs = self.staged.run(stage, received, args, kwargs)
                if stage == line.num_stages - 1:
                    results.append(outputs)
                else:
                    travelling = [tensor.detach() for tensor in outputs]
                    sent.append((line.send(travelling, stage + 1), travelling))
                if with_grad:
                    self._kept[index, stage] = (received, outputs)
        _wait(sent)
        return results

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run all backwards.

        Args:
            gradients: Of the joined outputs; only looked at where the last stage is.

        Raises:
            RuntimeError: When they have run already.
        """
        if self._kept is None:
            raise RuntimeError(
                "The backward of a pipelined model can run only once for each forward: add up the losses that come "
                "from one forward and call backward() for their sum."
            )
        line, sent = self.line, []
        shared = share_gradients(gradients, len(self.batch), self.batch.weights) if line.rank == line.last_rank else []
        for index in range(len(self.batch)):
            for stage in reversed(line.held):
                received, outputs = self._kept.pop((index, stage))
                if stage == line.num_stages - 1:
                    wanted: Sequence[torch.Tensor | None] = shared[index]
                else:
                    wanted = self._receive_gradients(stage)
                _propagate(outputs, wanted)
                if stage:
                    travelling = [
                        torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()
                        for tensor in received
                        if tensor.requires_grad
                    ]
                    sent.append((line.send(travelling, stage - 1), travelling))
        self._kept = None
        _wait(sent)

    def _shapes(self, stage: int) -> list[TensorShape]:
        """What goes from a stage to the next one."""
        return self.structures[self.staged.cut.last_block(stage)][0].tensors

    def _receive_gradients(self, stage: int) -> list[torch.Tensor | None]:
        shapes = self._shapes(stage)
        received = iter(self.line.receive([shape for shape in shapes if shape.needs_grad], stage + 1))
        return [next(received) if shape.needs_grad else None for shape in shapes]


def _propagate(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad and gradient is not None
    ]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


def _wait(sent: Sequence[tuple[list[Any], Any]]) -> None:
    for works, _ in sent:
        for work in works:
            work.wait()
