"""`MegatronEngine`: the prepared model, whose call is a whole training step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from accel_integrations.engines.megatron.batches import Batch, Limits, make_batch
from accel_integrations.engines.megatron.build import Chunks
from accel_integrations.engines.megatron.cpu import on_device
from accel_integrations.engines.megatron.optimizing import ShardedOptimizer
from accel_integrations.engines.megatron.schedule import Outcome, Schedule
from accel_integrations.engines.megatron.weights import ShardedWeights
from accel_state.public_names import known_as


@dataclass
class Parts:
    """What `prepare` made of a model.

    Args:
        original: The Hugging Face model, without values.
        chunks: This rank's part of it.
        weights: Its weights over all ranks.
        schedule: Runs batches.
        limits: What batches may be like.
        device: Where it is trained.
        max_norm: At which gradients are clipped; 0 for not at all.
        return_logits: Whether outputs have logits in evaluation, where batches have labels.
        after_step: Called after each step of the optimizer.
        handler: The object of `custom_train_step_class`, if any.
    """

    original: nn.Module
    chunks: Chunks
    weights: ShardedWeights
    schedule: Schedule
    limits: Limits
    device: torch.device
    max_norm: float
    return_logits: bool
    after_step: Callable[[], None]
    handler: Any = None


@known_as("accelerate.utils.megatron_lm.MegatronEngine")
class MegatronEngine(nn.Module):
    """A model that Megatron-LM trains: in training its call takes a whole step, in evaluation it computes the loss.

    Args:
        accelerator: Not used.
        model: What the engine made of the model.
        optimizer: The optimizer that takes the steps; None for evaluation only.
        scheduler: The scheduler of the optimizer, if any.

    Attributes:
        module: The model that was prepared, without values: its configuration and structure.
        base_model: The first chunk of this rank.
        optimizer, scheduler: As given.
        train_step_handler: The object of `custom_train_step_class`, if any.
        module_config: megatron-core's configuration of the model.
        iteration: How many steps were taken.
        grad_norm: The norm of all gradients at the last step, before clipping (0-dim float32).
        total_loss_dict, eval_total_loss_dict: Sums of losses in training and in evaluation since `log_eval_results`.
    """

    module: Any
    base_model: Any
    optimizer: Any
    scheduler: Any
    train_step_handler: Any
    module_config: Any
    iteration: int
    num_floating_point_operations_so_far: int
    report_memory_flag: bool
    total_loss_dict: dict[str, Any]
    eval_total_loss_dict: dict[str, Any]
    grad_norm: torch.Tensor | None

    def __init__(self, accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        super().__init__()
        if not isinstance(model, Parts):
            raise TypeError("MegatronEngine is made by Accelerator.prepare(). Pass the model to that.")
        self.__dict__["module"] = model.original  # no submodule: it has no values
        self.chunks = nn.ModuleList(model.chunks.modules)
        self.base_model = model.chunks.modules[0]
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.module_config = model.chunks.config
        self.train_step_handler = model.handler
        self.iteration = 0
        self.num_floating_point_operations_so_far = 0
        self.report_memory_flag = True
        self.total_loss_dict = {}
        self.eval_total_loss_dict = {}
        self.grad_norm = None
        self.parts = model
        self.sharded: ShardedOptimizer | None = None

    @property
    def config(self) -> Any:
        """The configuration of the model that was prepared."""
        return self.parts.original.config

    def get_module_config(self) -> dict[str, Any]:
        """megatron-core's configuration of the model, by name."""
        return dict(vars(self.module_config))

    def get_batch_data_iterator(self, batch_data: Any) -> Any:
        """An iterator over the micro-batches of a batch: dicts of tensors."""
        size = self.parts.limits.num_micro_batches
        cut = {name: value.chunk(size) for name, value in batch_data.items()}
        return iter([{name: parts[number] for name, parts in cut.items()} for number in range(size)])

    def forward(self, **batch_data: Any) -> Any:
        """Take a step, or compute the loss and the logits in evaluation.

        Args:
            batch_data: What the model of transformers takes: `input_ids`, `labels` and `attention_mask`, int64 (samples,
                tokens), and so on. Labels of -100 count for nothing. All ranks of a replica pass the same.

        Returns:
            An object with `loss`, 0-dim float32: the mean over all tokens of all replicas, the same on every rank.

        Raises:
            ValueError: The batch cannot be used.
        """
        return self.train_step(**batch_data) if self.training else self.eval_step(**batch_data)

    def train_step(self, **batch_data: Any) -> Any:
        """Forward and backward passes of all micro-batches, and a step of the optimizer and the scheduler."""
        if self.sharded is None:
            raise RuntimeError(
                "The model was called in training, but prepared without an optimizer. Pass both to one call of prepare(), or "
                "call model.eval() first."
            )
        batch = self._batch(batch_data)
        self.sharded.loss_scale.expect(math.prod(batch.shape))
        with on_device(self.parts.device):
            outcome = self.parts.schedule.train(batch)
            self.grad_norm = self.sharded.step(self.parts.max_norm)
        self.optimizer.note_step(self.sharded.skipped)
        self.iteration += 1
        _add(self.total_loss_dict, outcome.loss)
        self.parts.after_step()
        return self._output(outcome)

    def eval_step(self, **batch_data: Any) -> Any:
        """Forward passes of all micro-batches."""
        batch = self._batch(batch_data)
        with_logits = self.parts.return_logits or not batch.has_labels
        with on_device(self.parts.device):
            outcome = self.parts.schedule.evaluate(batch, with_logits)
        _add(self.eval_total_loss_dict, outcome.loss)
        return self._output(outcome)

    def log_eval_results(self) -> None:
        """Forget the sums of losses of an evaluation; trackers log what a program gives to `accelerator.log`."""
        self.eval_total_loss_dict.clear()

    def save_checkpoint(self, output_dir: Any) -> NoReturn:
        """Refuse: checkpoints are written for all objects together."""
        raise NotImplementedError(
            "Checkpoints are written for all prepared objects together: call accelerator.save_state(output_dir)."
        )

    def load_checkpoint(self, input_dir: Any) -> NoReturn:
        """Refuse: checkpoints are read for all objects together."""
        raise NotImplementedError(
            "Checkpoints are read for all prepared objects together: call accelerator.load_state(input_dir)."
        )

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: this rank holds a part of the model only."""
        raise NotImplementedError(
            "generate() needs the full model on one rank. Write it with accelerator.save_model(model, folder), and load it "
            f"there: {type(self.parts.original).__name__}.from_pretrained(folder)."
        )

    def _batch(self, values: Any) -> Batch:
        return make_batch(values, self.parts.limits, self.parts.device, training=self.training)

    def _output(self, outcome: Outcome) -> Any:
        handler = self.train_step_handler
        if (output_class := getattr(handler, "model_output_class", None)) is not None:
            return output_class(loss=outcome.loss)
        return self.parts.limits.task.output(outcome.loss, outcome.logits)


def _add(sums: dict[str, Any], loss: torch.Tensor | None) -> None:
    if loss is not None:
        sums["lm loss"] = sums.get("lm loss", 0.0) + loss
        sums["steps"] = sums.get("steps", 0) + 1
