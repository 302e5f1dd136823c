"""Pipelines reach the loss curve of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from accel_state.mesh import ParallelismConfig
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from accel_state.settings.parallelism import PipelineParallelConfig
from accelerate import Accelerator
from tests.support.ranks import ranks
from tests.support.tiny_transformer import (
    TinyTransformer,
    batches,
    make_loader,
    make_model,
    reference_curve,
    shift,
    token_loss,
)

STEPS, BATCH_SIZE = 50, 8
ADAMW = partial(torch.optim.AdamW, lr=3e-3)


class WithLoss(nn.Module):
    """A language model that returns its loss, as those of transformers do."""

    def __init__(self, model: TinyTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss of the batch, and its logits."""
        logits = self.model(input_ids)
        return {"logits": logits, "loss": token_loss(logits, shift(labels))}


def pipelined(schedule: str = "gpipe", copies: int = 1, stages: int = 2, **settings: Any) -> Accelerator:
    handler = PipelineParallelConfig(schedule, **settings)  # type: ignore[arg-type]
    config = ParallelismConfig(pp_size=stages, dp_replicate_size=copies, pp_handler=handler)
    return Accelerator(cpu=True, parallelism_config=config)


def loss_curve(accelerator: Accelerator, max_norm: float | None = None, **options: Any) -> list[float]:
    """Train as a user would, with a loss computed outside of the model."""
    copies = accelerator.parallelism_config.data_parallel_size  # type: ignore[union-attr]
    model = make_model(**options)
    optimizer = ADAMW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(BATCH_SIZE // copies))
    losses = []
    for batch in batches(loader, STEPS):
        loss = token_loss(model(batch["input_ids"]), shift(batch["labels"]))
        accelerator.backward(loss)
        if max_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
    return losses


def curve_of_model_loss(accelerator: Accelerator, **options: Any) -> list[float]:
    """Likewise, with the loss that the model returns."""
    copies = accelerator.parallelism_config.data_parallel_size  # type: ignore[union-attr]
    model: nn.Module = WithLoss(make_model(**options))
    optimizer = ADAMW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(BATCH_SIZE // copies))
    losses = []
    for batch in batches(loader, STEPS):
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
    return losses


def assert_same(losses: list[float], expected: list[float]) -> None:
    worst = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
    assert losses[-1] < losses[0] / 1.5
    assert worst < 1e-5, f"losses differ by up to {worst}"


@pytest.mark.takes_turns
@ranks(2)
def test_two_stages(rank: int, world: int) -> None:
    assert_same(loss_curve(pipelined()), reference_curve(STEPS, BATCH_SIZE, ADAMW))


@pytest.mark.thorough
@ranks(4)
def test_four_stages_with_clipping_and_tied_weights(rank: int, world: int) -> None:
    options: dict[str, Any] = {"layers": 4, "tied": True, "max_norm": 0.3}
    assert_same(loss_curve(pipelined(stages=4), **options), reference_curve(STEPS, BATCH_SIZE, ADAMW, **options))


@pytest.mark.thorough
@ranks(4)
def test_two_stages_of_two_copies(rank: int, world: int) -> None:
    options: dict[str, Any] = {"tied": True, "max_norm": 0.3}
    assert_same(loss_curve(pipelined(copies=2), **options), reference_curve(STEPS, BATCH_SIZE, ADAMW, **options))


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved1f1b"])
@ranks(2)
def test_schedules(rank: int, world: int, schedule: str) -> None:
    options: dict[str, Any] = {"layers": 4, "tied": True}
    expected = reference_curve(STEPS, BATCH_SIZE, ADAMW, max_norm=0.5, **options)
    assert_same(curve_of_model_loss(pipelined(schedule, num_microbatches=4), **options), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b"])
@ranks(4)
def test_schedules_of_two_copies(rank: int, world: int, schedule: str) -> None:
    expected = reference_curve(STEPS, BATCH_SIZE, ADAMW, max_norm=0.5, layers=4)
    assert_same(curve_of_model_loss(pipelined(schedule, copies=2, num_microbatches=4), layers=4), expected)


@pytest.mark.takes_turns
@ranks(2)
def test_digits(rank: int, world: int) -> None:
    pytest.importorskip("sklearn")
    from tests.support.digits_data import digits_batches, make_network

    def curve(prepare: Any) -> list[float]:
        model = make_network()
        optimizer = ADAMW(model.parameters())
        model, optimizer, backward = prepare(model, optimizer)
        losses = []
        for images, labels in digits_batches(STEPS):
            loss = nn.functional.cross_entropy(model(images), labels)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    accelerator = pipelined(num_microbatches=4)
    losses = curve(lambda *objects: (*accelerator.prepare(*objects), accelerator.backward))
    assert_same(losses, curve(lambda *objects: (*objects, torch.Tensor.backward)))


def sharded(stages: int, shards: int, schedule: str = "gpipe") -> Accelerator:
    config = ParallelismConfig(
        pp_size=stages,
        dp_shard_size=shards,
        pp_handler=PipelineParallelConfig(schedule),  # type: ignore[arg-type]
    )
    return Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))


@pytest.mark.thorough
@ranks(4)
def test_two_stages_of_sharded_parameters(rank: int, world: int) -> None:
    options: dict[str, Any] = {"tied": True, "max_norm": 0.3}
    assert_same(loss_curve(sharded(2, 2), **options), reference_curve(STEPS, BATCH_SIZE, ADAMW, **options))


@pytest.mark.thorough
@ranks(4)
def test_1f1b_of_sharded_parameters(rank: int, world: int) -> None:
    expected = reference_curve(STEPS, BATCH_SIZE, ADAMW, max_norm=0.5, layers=4)
    assert_same(curve_of_model_loss(sharded(2, 2, "1f1b"), layers=4), expected)
