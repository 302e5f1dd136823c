"""Schedules that begin the backward of a microbatch before the forward of all others is through: torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from accel_integrations.parallel.pipeline_batch import Microbatches
from accel_integrations.parallel.pipeline_run import PipelineGroup
from accel_integrations.parallel.pipeline_shapes import Structure, TensorShape
from accel_integrations.parallel.pipeline_stage import StagedModel

SCHEDULES = {"1f1b": "Schedule1F1B", "interleaved1f1b": "ScheduleInterleaved1F1B"}
"""Class of `torch.distributed.pipelining` by the schedule's name."""


class Scheduled:
    """Runs forward and backward of a batch together.

    torch's schedules hand microbatches of tensors to the first stage only. So each stage is given the microbatch's
    number, and takes its arguments from the batch, which all processes have.

    Args:
        line: The processes.
        staged: The stages held here.
        name: The schedule.
    """

    def __init__(self, line: PipelineGroup, staged: StagedModel, name: str) -> None:
        self._line = line
        self._staged = staged
        self._name = name
        self._schedules: dict[Any, Any] = {}
        self._batch: Microbatches
        self._loss_index = 0

    def run(
        self, batch: Microbatches, structures: dict[str, list[Structure]], loss_index: int
    ) -> tuple[torch.Tensor, Callable[[Sequence[torch.Tensor | None]], None]]:
        """Run a batch.

        Args:
            batch: The microbatches.
            structures: What the modules return for one of them.
            loss_index: Which of the tensors of the model's output is the loss.

        Returns:
            The loss of the batch, the same on all processes, and a function that adds the gradients, which are known
            already, to those of the parameters, multiplied by that of the loss.
        """
        self._batch, self._loss_index = batch, loss_index
        self._staged.structures = structures
        schedule = self._schedule(batch, structures)
        parameters = [parameter for parameter in self._staged.model.parameters() if parameter.requires_grad]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        losses: list[torch.Tensor] = []
        numbers = torch.arange(len(batch))
        try:
            arguments = (numbers,) if 0 in self._line.held else ()
            schedule.step(*arguments, number=numbers, target=numbers, losses=losses, return_outputs=False)
            fresh = [parameter.grad for parameter in parameters]
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        (structure,) = structures[""]
        loss = structure.tensors[loss_index].empty(self._line.device)
        if losses:
            loss.copy_(torch.stack([one.detach() for one in losses]).sum())
        self._line.broadcast(loss, self._line.last_rank)
        return loss, lambda gradients: _add(parameters, fresh, gradients[0])

    def _schedule(self, batch: Microbatches, structures: dict[str, list[Structure]]) -> Any:
        found = self._schedules.get(batch.signature)
        if found is None:
            import torch.distributed.pipelining as pipelining

            stages = [self._make_stage(stage, structures) for stage in self._line.held]
            kind = getattr(pipelining, SCHEDULES[self._name])
            own = stages if self._name == "interleaved1f1b" else stages[0]
            found = kind(own, len(batch), loss_fn=self._loss, scale_grads=False)
            self._schedules[batch.signature] = found
        return found

    def _make_stage(self, stage: int, structures: dict[str, list[Structure]]) -> Any:
        from torch.distributed.pipelining import PipelineStage

        cut, line = self._staged.cut, self._line
        last = line.num_stages - 1
        coming = structures[cut.last_block(stage - 1)][0].tensors if stage else [TensorShape((1,), torch.int64)]
        going = structures[""][0].tensors if stage == last else structures[cut.last_block(stage)][0].tensors
        return PipelineStage(
            _Numbered(stage, self),
            stage,
            line.num_stages,
            line.device,
            input_args=tuple(map(_on_meta, coming)),
            output_args=tuple(map(_on_meta, going)),
            group=line.group,
        )

    def run_stage(self, stage: int, received: Sequence[torch.Tensor], number: int) -> tuple[torch.Tensor, ...]:
        """Run a stage for a microbatch."""
        args, kwargs = self._batch.parts[number]
        return self._staged.run(stage, received if stage else (), args, kwargs)

    def _loss(self, outputs: Any, number: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (outputs if isinstance(outputs, tuple) else (outputs,))[self._loss_index]
        return loss * self._batch.weights[int(number)]


class _Numbered(nn.Module):
    """A stage that is told the number of the microbatch."""

    def __init__(self, stage: int, schedule: Scheduled) -> None:
        super().__init__()
        self.stage = stage
        self.schedule = schedule

    def forward(self, *received: torch.Tensor, number: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the stage."""
        return self.schedule.run_stage(self.stage, received, int(number))


def _on_meta(shape: TensorShape) -> torch.Tensor:
    return shape.empty("meta").requires_grad_(shape.needs_grad)


def _add(
    parameters: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor | None], factor: torch.Tensor | None
) -> None:
    if factor is None:
        return
    for parameter, gradient in zip(parameters, fresh, strict=True):
        if gradient is not None:
            scaled = gradient * factor.to(gradient.dtype)
            parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
