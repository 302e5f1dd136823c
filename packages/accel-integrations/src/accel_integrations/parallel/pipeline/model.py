"""The pipelined model: every rank holds some of its stages, and calls it as if it held them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_integrations.parallel.pipeline.group import PipelineGroup
from accel_integrations.parallel.pipeline.microbatches import Microbatches, find_size, join_outputs, split_batch
from accel_integrations.parallel.pipeline.schedules import GPipeRun, TorchSchedule
from accel_integrations.parallel.pipeline.shapes import Structure, TensorShape
from accel_integrations.parallel.pipeline.stage import StagedModel, check_nothing_is_collected

if TYPE_CHECKING:
    from accel_state.settings.parallelism import PipelineParallelConfig

MOST_SHAPES = 256  # number of different batch shapes whose outputs are remembered


class Pipeline:
    """Runs batches through the stages.

    Args:
        staged: The stages of this rank.
        group: The pipeline group.
        settings: The schedule and the number of micro-batches.
        is_last_batch: Whether a loader is at its end, so that a batch may be smaller than the others.
    """

    def __init__(
        self,
        staged: StagedModel,
        group: PipelineGroup,
        settings: PipelineParallelConfig,
        is_last_batch: Callable[[], bool] = lambda: False,
    ) -> None:
        self.staged = staged
        self.group = group
        self.settings = settings
        self.on_backward: Callable[[], None] = lambda: None
        """Called after each backward pass, when there are gradients that were not all-reduced yet."""
        self._is_last_batch = is_last_batch
        self._measured: dict[Any, dict[str, list[Structure]]] = {}
        self._torch_schedule: TorchSchedule | None = None

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches per batch."""
        return self.settings.num_microbatches or self.group.num_stages

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a batch; returns what the full model would return for it, on every rank.

        With gradients and a loss among the outputs, the other outputs are returned only on the rank with the last
        stage, and are None on other ranks, unless `broadcast_outputs` is set.
        """
        check_nothing_is_collected(kwargs, "the arguments of the model")
        training = torch.is_grad_enabled()
        count = self._count(find_size(args, kwargs), training)
        batch = split_batch(args, kwargs, count, self.settings.loss_weight)
        structures = self.measure(batch)
        in_order = count < self.group.num_stages or not (training and self.staged.model.training)
        if self.settings.schedule == "gpipe" or in_order:
            return self._run_deferred(batch, structures)
        return self._run_scheduled(batch, structures)

    def _count(self, size: int, training: bool) -> int:
        """Number of micro-batches for a batch of this size.

        Raises:
            ValueError: When a training batch cannot be split evenly, unless it is the last one of a loader.
        """
        count = self.num_microbatches
        if size % count == 0:
            return count
        if training and not self._is_last_batch():
            divisors = [number for number in range(self.group.num_stages, size + 1) if size % number == 0]
            raise ValueError(
                f"A batch of {size} cannot be split into num_microbatches={count} equal micro-batches. Choose a batch "
                f"size that is a multiple of {count}, or for this batch size one of num_microbatches = "
                f"{', '.join(map(str, divisors)) or 'nothing'}."
            )
        return max(number for number in range(1, count + 1) if size % number == 0)

    # ---- shapes -------------------------------------------------------------------------------------------------

    def measure(self, batch: Microbatches) -> dict[str, list[Structure]]:
        """What all modules return for a micro-batch; measured stage after stage when shapes are new."""
        key = (batch.signature, torch.is_grad_enabled(), self.staged.model.training)
        structures = self._measured.get(key)
        if structures is None:
            structures = self.staged.structures = {}
            args, kwargs = batch.inputs[0]
            for stage in range(self.group.num_stages):
                source = self.group.rank_of(stage)
                outcome: Any = None
                if source == self.group.rank:
                    try:
                        outcome = self.staged.measure(stage, args, kwargs)
                    except Exception as error:
                        outcome = error
                shared = self.group.broadcast_object(_sendable(outcome), source)
                if isinstance(outcome, Exception):
                    raise outcome
                if isinstance(shared, str):
                    raise RuntimeError(f"Stage {stage} of the pipeline failed on another rank: {shared}")
                structures.update(shared)
            if len(self._measured) >= MOST_SHAPES:
                self._measured.clear()
            self._measured[key] = structures
        return structures

    # ---- GPipe: forward first, backward later -------------------------------------------------------------------

    def _run_deferred(self, batch: Microbatches, structures: dict[str, list[Structure]]) -> Any:
        run = GPipeRun(self.group, self.staged, structures, batch)
        results = run.forward()
        (structure,) = structures[""]
        values: list[Any] = list(join_outputs(results, batch.weights)) if results else [None] * len(structure.tensors)
        self._broadcast(values, structure.tensors, len(batch))
        if torch.is_grad_enabled() and any(shape.needs_grad for shape in structure.tensors):
            present = [value for value in values if value is not None]
            shapes = [None if value is None else shape for value, shape in zip(values, structure.tensors, strict=True)]
            differentiable = iter(_attach(run.backward, present, shapes, self.on_backward))
            values = [None if value is None else next(differentiable) for value in values]
        return structure.filled(values)

    def _broadcast(self, values: list[Any], shapes: list[TensorShape], rows: int) -> None:
        """Broadcast outputs of the last stage to all ranks, into `values`."""
        broadcast_outputs = self.settings.broadcast_outputs
        losses = [is_loss(shape) for shape in shapes]
        everything = broadcast_outputs or (broadcast_outputs is None and not any(losses))
        for index, shape in enumerate(shapes):
            if not (everything or losses[index]):
                continue
            if values[index] is None:
                values[index] = shape.empty(self.group.device, rows)
            self.group.broadcast(values[index], self.group.last_rank)

    # ---- backward interleaved with forward ----------------------------------------------------------------------

    def _run_scheduled(self, batch: Microbatches, structures: dict[str, list[Structure]]) -> Any:
        (structure,) = structures[""]
        losses = [index for index, shape in enumerate(structure.tensors) if is_loss(shape)]
        if not losses:
            raise ValueError(
                f"schedule={self.settings.schedule!r} starts backward passes before all forward passes have ended, so "
                f"{type(self.staged.model).__name__} must return its loss, a 0-dim tensor. Compute the loss in the "
                "model's forward, or choose schedule='gpipe', which fits any training loop."
            )
        if self._torch_schedule is None:
            self._torch_schedule = TorchSchedule(self.group, self.staged, self.settings.schedule)
        loss, backward = self._torch_schedule.run(batch, structures, losses[0])
        values: list[Any] = [None] * len(structure.tensors)
        (values[losses[0]],) = _attach(backward, [loss], [structure.tensors[losses[0]]], self.on_backward)
        return structure.filled(values)


def is_loss(shape: TensorShape) -> bool:
    """Whether a tensor is a loss: 0-dim and requires grad."""
    return not shape.shape and shape.needs_grad


class PipelinedModel(nn.Module):
    """A model of which every rank of a pipeline holds some stages; called as if it held them all.

    Args:
        model: The model, with placeholders for the modules of other ranks.
        pipeline: Runs batches through it.
    """

    def __init__(self, model: nn.Module, pipeline: Pipeline) -> None:
        super().__init__()
        self.module = model
        self.__dict__["pipeline"] = pipeline
        self.train(model.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the full model returns for this batch."""
        pipeline: Pipeline = self.__dict__["pipeline"]
        return pipeline(args, kwargs)


def _sendable(outcome: Any) -> Any:
    return f"{type(outcome).__name__}: {outcome}" if isinstance(outcome, Exception) else outcome


class _Attached(torch.autograd.Function):
    """Outputs whose backward pass is that of a pipeline."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, backward: Any, values: Any, shapes: Any, done: Any) -> Any:
        ctx.run_backward, ctx.done = backward, done
        ctx.needed = [shape is not None for shape in shapes]
        ctx.set_materialize_grads(False)
        shown = tuple(value.view_as(value) for value in values)
        present = [shape for shape in shapes if shape is not None]
        ctx.mark_non_differentiable(
            *(value for value, shape in zip(shown, present, strict=True) if not shape.needs_grad)
        )
        return shown

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        gradient_iterator = iter(gradients)
        with torch.enable_grad():
            ctx.run_backward([next(gradient_iterator) if needed else None for needed in ctx.needed])
        ctx.done()
        return None, None, None, None, None


def _attach(
    backward: Any, values: list[torch.Tensor], shapes: list[Any], done: Callable[[], None]
) -> tuple[torch.Tensor, ...]:
    """Make `backward` run when gradients of the values are computed.

    Args:
        backward: Called with one gradient (or None) for each entry of `shapes`.
        values: The tensors for those entries that are not None.
        shapes: What all tensors are like; None for those that are not here.
        done: Called afterwards.
    """
    anchor = torch.zeros((), requires_grad=True)
    attached: tuple[torch.Tensor, ...] = _Attached.apply(anchor, backward, values, shapes, done)
    return attached
