"""Running a batch through the pipeline: forward and backward passes of all micro-batches, and the loss on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_integrations.engines.megatron.batches import Batch, MicroBatch
from accel_integrations.engines.megatron.build import Chunks
from accel_integrations.engines.megatron.library import load

LossFunction = Callable[[Tensor], tuple[Any, ...]]
OwnLoss = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""A loss of the program: of which tokens count, float32 (B, S), and their losses (B, S); with losses to show by name."""


@dataclass(frozen=True)
class Outcome:
    """What a batch gave.

    Args:
        loss: The mean over the counted tokens of all replicas, 0-dim float32, the same on all ranks; None without labels.
        logits: Of this replica's batch, (batch, S, tokens of the vocabulary), on all of its ranks; None unless wanted.
    """

    loss: Tensor | None
    logits: Tensor | None


class Schedule:
    """megatron-core's pipeline schedule for this rank's chunks.

    Args:
        chunks: The chunks.
        num_tokens: The size of the vocabulary, without padding.
        device: Where they are.
        own_loss: Computes the loss in place of the mean over tokens; None for that.
    """

    def __init__(self, chunks: Chunks, num_tokens: int, device: torch.device, own_loss: OwnLoss | None = None) -> None:
        self._chunks = chunks
        self._own_loss = own_loss
        self._num_tokens = num_tokens
        self._device = device
        self._parallel = load("parallel_state")

    def train(self, batch: Batch) -> Outcome:
        """Forward and backward passes; gradients, averaged over replicas, are in `main_grad` afterwards."""
        for chunk in self._chunks.wrapped:
            chunk.zero_grad_buffer()
        stored = self._run(batch, self._training_step, forward_only=False)
        return Outcome(self._mean(stored), None)

    @torch.no_grad()
    def evaluate(self, batch: Batch, with_logits: bool) -> Outcome:
        """Forward passes only."""
        stored = self._run(batch, self._evaluation_step if with_logits else self._training_step, forward_only=True)
        loss = self._mean(stored) if batch.micro_batches[0].labels is not None else None
        return Outcome(loss, self._logits(stored, batch) if with_logits else None)

    # ---- what megatron-core calls -----------------------------------------------------------------------------------

    def _run(self, batch: Batch, step: Callable[..., Any], *, forward_only: bool) -> list[dict[str, Tensor]]:
        from_core = load("pipeline_parallel").get_forward_backward_func()
        samples, length = batch.shape
        iterators = [iter(batch.micro_batches) for _ in self._chunks.wrapped]
        several = len(iterators) > 1
        found: list[dict[str, Tensor]] = from_core(
            forward_step_func=step,
            data_iterator=iterators if several else iterators[0],
            model=self._chunks.wrapped if several else self._chunks.wrapped[0],
            num_microbatches=len(batch.micro_batches),
            seq_length=length,
            micro_batch_size=samples,
            forward_only=forward_only,
        )
        return found

    def _training_step(self, batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, LossFunction]:
        part = next(batches)
        losses = model(part.tokens, part.positions, part.hidden, labels=part.labels)
        return losses, partial(self._loss, part)

    def _loss(self, part: MicroBatch, losses: Tensor) -> tuple[Any, ...]:
        return _summed(losses, part) if self._own_loss is None else _of_program(self._own_loss, losses, part)

    def _evaluation_step(self, batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, LossFunction]:
        part = next(batches)
        logits = model(part.tokens, part.positions, part.hidden)

        def loss_function(logits: Tensor) -> tuple[Any, ...]:
            kept = {"logits": logits.clone()}  # the loss is computed in place
            if part.labels is None:
                return logits.sum(), torch.zeros((), dtype=torch.int, device=logits.device), kept
            core = load("tensor_parallel")
            losses = core.vocab_parallel_cross_entropy(
                logits.transpose(0, 1).contiguous(), part.labels.t().contiguous()
            )
            found = self._loss(part, losses.t())
            return (*found[:-1], found[-1] | kept)

        return logits, loss_function

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
        dist.all_reduce(totals, group=self._parallel.get_data_parallel_group())
        self._from_last_stage(totals)
        return totals[0] / totals[1].clamp(min=1)

    def _logits(self, stored: list[dict[str, Tensor]], batch: Batch) -> Tensor:
        samples, length = batch.shape
        shape = (samples * len(batch.micro_batches), length, self._num_tokens)
        logits = torch.empty(shape, dtype=self._chunks.config.params_dtype, device=self._device)
        if stored:
            own = torch.cat([one["logits"] for one in stored]).contiguous()
            group = self._parallel.get_tensor_model_parallel_group()
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, own, group=group)
            logits = torch.cat(parts, dim=-1)[..., : self._num_tokens].contiguous()
        self._from_last_stage(logits)
        return logits[: batch.num_samples, : batch.length]

    def _from_last_stage(self, value: Tensor) -> None:
        if self._chunks.config.pipeline_model_parallel_size > 1:
            last = self._parallel.get_pipeline_model_parallel_last_rank()
            dist.broadcast(value, last, group=self._parallel.get_pipeline_model_parallel_group())


def _summed(losses: Tensor, part: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The sum of the counted losses (B, S), and their number."""
    assert part.counted is not None
    loss = (losses.float() * part.counted).sum()
    count = part.counted.sum().int()
    return loss, count, {"loss": loss.detach().clone(), "count": count.clone()}


def _of_program(own_loss: OwnLoss, losses: Tensor, part: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss that a function of the program computes, which counts as one whatever the number of tokens."""
    assert part.counted is not None
    loss, shown = own_loss(part.counted.float(), losses)
    extra = {name: value.detach().clone() for name, value in shown.items()}
    return loss, extra | {"loss": loss.detach().clone(), "count": loss.new_ones((), dtype=torch.int)}
