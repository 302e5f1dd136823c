"""Schedules: the order of the forward and backward passes of micro-batches.

`GPipeRun` is our own: all forward passes, then, once the loss is known, all backward passes. `TorchSchedule` runs
torch's 1F1B schedules, which begin the backward pass of a micro-batch before the forward passes of all others have
ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from accel_integrations.parallel.pipeline.group import PipelineGroup
from accel_integrations.parallel.pipeline.microbatches import Microbatches, split_gradients
from accel_integrations.parallel.pipeline.older_torch import match_dtypes, without_outputs
from accel_integrations.parallel.pipeline.shapes import Structure, TensorShape
from accel_integrations.parallel.pipeline.stage import StagedModel

SCHEDULES = {"1f1b": "Schedule1F1B", "interleaved1f1b": "ScheduleInterleaved1F1B"}
"""Class of `torch.distributed.pipelining` by the schedule's name."""


class GPipeRun:
    """One batch, all of whose forward passes run before the backward passes (GPipe). Its backward runs once.

    Args:
        group: The pipeline group.
        staged: The stages of this rank.
        structures: What the modules return for a micro-batch of this batch.
        batch: The micro-batches.
    """

    def __init__(
        self, group: PipelineGroup, staged: StagedModel, structures: dict[str, list[Structure]], batch: Microbatches
    ) -> None:
        self.group = group
        self.staged = staged
        self.structures = structures
        self.batch = batch
        self._kept: dict[tuple[int, int], tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]] | None = {}

    def forward(self) -> list[tuple[torch.Tensor, ...]]:
        """Run all forward passes; returns the output tensors of each micro-batch on the rank with the last stage."""
        group, sent, results = self.group, [], []
        with_grad = torch.is_grad_enabled()
        self.staged.structures = self.structures
        assert self._kept is not None
        coming = group.receive_in_order(
            (self._shapes(stage - 1), stage - 1) for _ in self.batch.inputs for stage in group.held if stage
        )
        for index, (args, kwargs) in enumerate(self.batch.inputs):
            for stage in group.held:
                received = next(coming) if stage else []
                if with_grad:
                    for tensor, shape in zip(received, self._shapes(stage - 1) if stage else (), strict=True):
                        tensor.requires_grad_(shape.needs_grad)
                outputs = self.staged.run(stage, received, args, kwargs)
                if stage == group.num_stages - 1:
                    results.append(outputs)
                else:
                    sent.append(group.send([tensor.detach() for tensor in outputs], stage + 1))
                if with_grad:
                    self._kept[index, stage] = (received, outputs)
        _wait(sent)
        return results

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run all backward passes.

        Args:
            gradients: The gradients of the joined outputs; used only on the rank with the last stage.

        Raises:
            RuntimeError: When they have run already.
        """
        if self._kept is None:
            raise RuntimeError(
                "The backward of a pipelined model can run only once for each forward. Add up the losses of one "
                "forward and call backward() for their sum."
            )
        group, sent = self.group, []
        shared = (
            split_gradients(gradients, len(self.batch), self.batch.weights) if group.rank == group.last_rank else []
        )
        last = group.num_stages - 1
        coming = group.receive_in_order(
            ([shape for shape in self._shapes(stage) if shape.needs_grad], stage + 1)
            for _ in range(len(self.batch))
            for stage in reversed(group.held)
            if stage != last
        )
        for index in range(len(self.batch)):
            for stage in reversed(group.held):
                received, outputs = self._kept.pop((index, stage))
                output_gradients = shared[index] if stage == last else self._for_each_output(stage, next(coming))
                _propagate(outputs, output_gradients)
                if stage:
                    travelling = [
                        torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()
                        for tensor in received
                        if tensor.requires_grad
                    ]
                    sent.append(group.send(travelling, stage - 1))
        self._kept = None
        _wait(sent)

    def _shapes(self, stage: int) -> list[TensorShape]:
        """Shapes of the tensors that a stage sends to the next one."""
        return self.structures[self.staged.split.last_block(stage)][0].tensors

    def _for_each_output(self, stage: int, received: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The received gradients, and None for outputs of the stage that require none."""
        gradients = iter(received)
        return [next(gradients) if shape.needs_grad else None for shape in self._shapes(stage)]


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


class TorchSchedule:
    """Runs forward and backward of a batch together.

    torch's schedules pass micro-batches of tensors to the first stage only. So each stage gets the index of the
    micro-batch, and takes its arguments from the batch, which all ranks have.

    Args:
        group: The pipeline group.
        staged: The stages of this rank.
        name: A key of `SCHEDULES`.
    """

    def __init__(self, group: PipelineGroup, staged: StagedModel, name: str) -> None:
        self._group = group
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
            batch: The micro-batches.
            structures: What the modules return for one of them.
            loss_index: The index of the loss among the tensors of the model's output.

        Returns:
            The loss of the batch (0-dim), the same on all ranks, and a backward function: it adds the gradients, which
            are computed already, to `parameter.grad`, multiplied by the gradient of the loss.
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
            arguments = (numbers,) if 0 in self._group.held else ()
            schedule.step(*arguments, number=numbers, target=numbers, losses=losses)
            fresh = [parameter.grad for parameter in parameters]
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        (structure,) = structures[""]
        loss = structure.tensors[loss_index].empty(self._group.device)
        if losses:
            loss.copy_(torch.stack([micro_loss.detach() for micro_loss in losses]).sum())
        self._group.broadcast(loss, self._group.last_rank)
        return loss, lambda gradients: _add(parameters, fresh, gradients[0])

    def _schedule(self, batch: Microbatches, structures: dict[str, list[Structure]]) -> Any:
        schedule = self._schedules.get(batch.signature)
        if schedule is None:
            import torch.distributed.pipelining as pipelining

            stages = [self._make_stage(stage, structures) for stage in self._group.held]
            kind = getattr(pipelining, SCHEDULES[self._name])
            local_stages = stages if self._name == "interleaved1f1b" else stages[0]
            schedule = without_outputs(kind(local_stages, len(batch), loss_fn=self._loss, scale_grads=False))
            self._schedules[batch.signature] = schedule
        return schedule

    def _make_stage(self, stage: int, structures: dict[str, list[Structure]]) -> Any:
        from torch.distributed.pipelining import PipelineStage

        split, group = self._staged.split, self._group
        last = group.num_stages - 1
        coming = structures[split.last_block(stage - 1)][0].tensors if stage else [TensorShape((1,), torch.int64)]
        going = structures[""][0].tensors if stage == last else structures[split.last_block(stage)][0].tensors
        return match_dtypes(
            PipelineStage(
                _Numbered(stage, self),
                stage,
                group.num_stages,
                group.device,
                input_args=tuple(map(_on_meta, coming)),
                output_args=tuple(map(_on_meta, going)),
                group=group.process_group,
            )
        )

    def run_stage(self, stage: int, received: Sequence[torch.Tensor], number: int) -> tuple[torch.Tensor, ...]:
        """Run a stage for a micro-batch."""
        args, kwargs = self._batch.inputs[number]
        return self._staged.run(stage, received if stage else (), args, kwargs)

    def _loss(self, outputs: Any, number: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (outputs if isinstance(outputs, tuple) else (outputs,))[self._loss_index]
        return loss * self._batch.weights[int(number)]


class _Numbered(nn.Module):
    """A stage that gets the index of the micro-batch."""

    def __init__(self, stage: int, schedule: TorchSchedule) -> None:
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
