"""Running a batch through the pipeline: forward and backward passes of all micro-batches, and the loss on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_integrations.megatron.chunks import Chunks
from accel_integrations.megatron.core import load
from accel_integrations.megatron.data.batches import Batch
from accel_integrations.megatron.data.sequences import SequenceShares
from accel_integrations.megatron.data.tasks import MicroBatch, Task
from accel_integrations.megatron.programs import Hooks

LossFunction = Callable[[Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Outcome:
    """What a batch gave.

    Args:
        loss: The mean over what counts in all replicas, 0-dim float32, the same on all ranks; None without labels.
        logits: Of this replica's batch, on all of its ranks, by name; empty unless wanted.
    """

    loss: Tensor | None
    logits: Mapping[str, Tensor]


class Schedule:
    """megatron-core's pipeline schedule for this rank's chunks.

    Args:
        chunks: The chunks.
        task: What the model reads and gives.
        num_tokens: The size of the vocabulary, without padding.
        device: Where they are.
        hooks: Functions of the program.
    """

    def __init__(self, chunks: Chunks, task: Task, num_tokens: int, device: torch.device, hooks: Hooks) -> None:
        self._chunks = chunks
        self._task = task
        self._hooks = hooks
        self._num_tokens = num_tokens
        self._device = device
        self._parallel = load("parallel_state")
        self._shares = SequenceShares.here()
        self._of_sequence = self._parallel.get_context_parallel_group()
        self._replicas = self._parallel.get_data_parallel_group(with_context_parallel=True)
        self._has_replicas = dist.get_world_size(self._replicas) > 1
        self._run_all = load("pipeline_parallel").get_forward_backward_func()

    def without_hooks(self) -> Schedule:
        """The same without functions of the program, which need not give logits."""
        return Schedule(self._chunks, self._task, self._num_tokens, self._device, Hooks())

    def train(self, batch: Batch) -> Outcome:
        """Forward and backward passes; gradients, averaged over replicas, are in `main_grad` afterwards."""
        for chunk in self._chunks.wrapped:
            chunk.zero_grad_buffer()
        stored = self._run(batch, self._training_step, forward_only=False)
        return Outcome(self._mean(stored), {})

    @torch.no_grad()
    def evaluate(self, batch: Batch, with_logits: bool) -> Outcome:
        """Forward passes only."""
        with_logits = with_logits and self._hooks.forward_step is None
        step = self._evaluation_step if with_logits else self._training_step
        stored = self._run(batch, step, forward_only=True)
        loss = self._mean(stored) if batch.has_labels else None
        return Outcome(loss, self._logits(stored, batch) if with_logits else {})

    # ---- what megatron-core calls -----------------------------------------------------------------------------------

    def _run(self, batch: Batch, step: Callable[..., Any], *, forward_only: bool) -> list[dict[str, Tensor]]:
        samples, length = batch.shape
        parts = self._weighed(batch) if batch.has_labels and not self._hooks.reads_batches else batch.micro_batches
        iterators = [iter(parts) for _ in self._chunks.wrapped]
        several = len(iterators) > 1
        outputs: list[dict[str, Tensor]] = self._run_all(
            forward_step_func=step,
            data_iterator=iterators if several else iterators[0],
            model=self._chunks.wrapped if several else self._chunks.wrapped[0],
            num_microbatches=len(parts),
            seq_length=length,
            micro_batch_size=samples,
            forward_only=forward_only,
        )
        return outputs

    def _weighed(self, batch: Batch) -> list[MicroBatch]:
        """Micro-batches with the weights of their losses, if there are several, each of which is a mean of its own."""
        counts = torch.stack([torch.stack(self._task.num_targets(part)) for part in batch.micro_batches]).float()
        if counts.shape[1] == 1:
            return batch.micro_batches
        if self._chunks.config.calculate_per_token_loss:
            total = counts.sum(0)
            dist.all_reduce(total, group=self._replicas)
            counts = total.expand_as(counts)
        weights = counts[:, :1] / counts.clamp(min=1)
        return [{**part, "weights": one} for part, one in zip(batch.micro_batches, weights, strict=True)]

    def _next(self, batches: Iterator[MicroBatch]) -> MicroBatch:
        read = self._hooks.get_batch
        return next(batches) if read is None else read(batches)

    def _training_step(self, batches: Iterator[MicroBatch], model: Any) -> tuple[Any, LossFunction]:
        if self._hooks.forward_step is not None:
            return self._hooks.forward_step(batches, model)
        part = self._next(batches)
        return self._task.call(model, part, with_losses=True), partial(self._loss, part)

    def _evaluation_step(self, batches: Iterator[MicroBatch], model: Any) -> tuple[Any, LossFunction]:
        part = self._next(batches)

        def loss_function(output: Any) -> tuple[Any, ...]:
            logits = {name: one.clone() for name, one in self._task.split_logits(output).items()}
            if not self._has_labels(part):
                first = next(iter(logits.values()))
                return first.sum(), torch.zeros((), dtype=torch.int, device=first.device), logits
            terms = self._loss(part, self._task.with_losses(output, part))
            return (*terms[:-1], terms[-1] | logits)

        return self._task.call(model, part, with_losses=False), loss_function

    def _has_labels(self, part: MicroBatch) -> bool:
        return "labels" in part and (len(self._task.labels) == 1 or "weights" in part)

    def _loss(self, part: MicroBatch, output: Any) -> tuple[Any, ...]:
        if self._hooks.loss is not None:
            return self._hooks.loss(part["loss_mask"], output)
        sums, count = torch.stack(self._task.losses(output, part)), self._task.num_targets(part)[0].int()
        loss = (sums * part["weights"]).sum() if "weights" in part else sums[0]
        if self._shares.size > 1 and not self._chunks.config.calculate_per_token_loss:
            # the mean of the micro-batch; gradients are averaged over ranks that have a part of the sum each
            dist.all_reduce(count, group=self._of_sequence)
            loss = loss * self._shares.size
        return loss, count, {"loss": loss.detach().clone(), "count": count.clone()}

    # ---- what the program gets --------------------------------------------------------------------------------------

    def _mean(self, stored: list[dict[str, Tensor]]) -> Tensor:
        """The mean loss from the last stage, as gradients are averaged: over tokens, or over micro-batches."""
        totals = torch.zeros(2, device=self._device)
        if stored:
            sums, counts = (torch.stack([one[key].float() for one in stored]) for key in ("loss", "count"))
            if self._chunks.config.calculate_per_token_loss:
                totals = torch.stack([sums.sum(), counts.sum()])
            else:
                totals = torch.stack([(sums / counts.clamp(min=1)).sum(), counts.new_tensor(len(stored))])
        if self._has_replicas:
            dist.all_reduce(totals, group=self._replicas)
        self._from_last_stage(totals)
        return totals[0] / totals[1].clamp(min=1)

    def _logits(self, stored: list[dict[str, Tensor]], batch: Batch) -> dict[str, Tensor]:
        samples, length = batch.shape
        outputs = {}
        for name, columns in self._task.logits.items():
            shape = (length, self._num_tokens) if columns is None else (columns,)
            logits = torch.empty(
                (samples * len(batch.micro_batches), *shape),
                dtype=self._chunks.config.params_dtype,
                device=self._device,
            )
            if stored:
                logits = torch.cat([one[name] for one in stored]).to(logits.dtype)
                logits = self._of_all_tokens(logits) if columns is None else logits.contiguous()
            self._from_last_stage(logits)
            outputs[name] = (
                logits[: batch.num_samples, : batch.length] if columns is None else logits[: batch.num_samples]
            )
        return outputs

    def _of_all_tokens(self, logits: Tensor) -> Tensor:
        """Logits over the vocabulary, and of all tokens, from those of each tensor-parallel and context-parallel rank."""
        group = self._parallel.get_tensor_model_parallel_group()
        logits = logits.contiguous()
        parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, logits, group=group)
        return self._shares.gather(torch.cat(parts, dim=-1)[..., : self._num_tokens].contiguous(), self._of_sequence)

    def _from_last_stage(self, value: Tensor) -> None:
        if self._chunks.config.pipeline_model_parallel_size > 1:
            last = self._parallel.get_pipeline_model_parallel_last_rank()
            dist.broadcast(value, last, group=self._parallel.get_pipeline_model_parallel_group())
