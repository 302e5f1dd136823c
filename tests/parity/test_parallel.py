"""Every way of sharing a model or a batch reaches the loss curve of one process."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state.accelerator_state import AcceleratorState
from accel_state.mesh import ParallelismConfig
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from accel_state.settings.parallelism import TorchContextParallelConfig, TorchTensorParallelConfig
from accelerate import Accelerator
from tests.support.ranks import ranks
from tests.support.tiny_transformer import (
    TP_PLAN,
    batches,
    make_loader,
    make_model,
    reference_curve,
    shift,
    token_loss,
)

STEPS, BATCH_SIZE = 50, 8
ADAMW = partial(torch.optim.AdamW, lr=3e-3)


@cache
def expected_curve(max_norm: float | None = None) -> list[float]:
    return reference_curve(STEPS, BATCH_SIZE, ADAMW, max_norm=max_norm)


def loss_curve(accelerator: Accelerator, max_norm: float | None = None, **options: Any) -> list[float]:
    """Train the tiny transformer as a user would; the losses are those of all processes together."""
    config = accelerator.parallelism_config
    model = make_model(**options)
    optimizer = ADAMW(model.parameters())
    loader = make_loader(BATCH_SIZE // config.data_parallel_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
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


def assert_same(losses: list[float], expected: list[float]) -> None:
    worst = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
    assert losses[-1] < losses[0] / 1.5
    assert worst < 1e-5, f"losses differ by up to {worst}"


def tensor_parallel(**sizes: int) -> ParallelismConfig:
    return ParallelismConfig(tp_handler=TorchTensorParallelConfig(plan=TP_PLAN), **sizes)


@pytest.mark.takes_turns
@ranks(2)
def test_tensor_parallel(rank: int, world: int) -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=tensor_parallel(tp_size=2))
    assert_same(loss_curve(accelerator, max_norm=0.5), expected_curve(max_norm=0.5))


@pytest.mark.thorough
@ranks(4)
def test_tensor_parallel_replicas(rank: int, world: int) -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=tensor_parallel(tp_size=2, dp_replicate_size=2))
    assert_same(loss_curve(accelerator), expected_curve())


def curve_on_shards(accelerator: Accelerator, weighted: bool = False, **options: Any) -> list[float]:
    """As `loss_curve`, where a loader hands out parts of sequences."""
    model = make_model(**options)
    optimizer = ADAMW(model.parameters())
    loader = make_loader(BATCH_SIZE // accelerator.parallelism_config.data_parallel_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in batches(loader, STEPS):
        loss = token_loss(model(batch["input_ids"], batch["position_ids"]), batch["shift_labels"])
        loss = accelerator.mean_over_tokens(loss, (batch["shift_labels"] != -100).sum())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.takes_turns
@ranks(2)
def test_sequence_parallel(rank: int, world: int) -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=2, sp_backend="torch"))
    assert_same(curve_on_shards(accelerator), expected_curve())


@pytest.mark.thorough
@ranks(4)
@pytest.mark.parametrize("other", ["dp_replicate_size", "tp_size"])
def test_sequence_parallel_with_another_axis(rank: int, world: int, other: str) -> None:
    config = ParallelismConfig(sp_size=2, sp_backend="torch", **{other: 2})
    if other == "tp_size":
        config.tp_handler.plan = TP_PLAN
    assert_same(curve_on_shards(Accelerator(cpu=True, parallelism_config=config)), expected_curve())


def curve_in_blocks(accelerator: Accelerator, **options: Any) -> list[float]:
    """As `loss_curve`, with context parallelism."""
    model = make_model(**options)
    optimizer = ADAMW(model.parameters())
    loader = make_loader(BATCH_SIZE // accelerator.parallelism_config.data_parallel_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in batches(loader, STEPS):
        tokens, labels = batch["input_ids"], shift(batch["labels"])
        positions = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
        buffers = [tokens, labels, positions]
        with accelerator.maybe_context_parallel(buffers, [1, 1, 1], no_restore_buffers=set(buffers)):
            loss = token_loss(model(tokens, positions), labels)
            loss = accelerator.mean_over_tokens(loss, (labels != -100).sum())
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@ranks(2)
@pytest.mark.parametrize("strategy", ["allgather", "alltoall"])
def test_context_parallel(rank: int, world: int, strategy: str) -> None:
    handler = TorchContextParallelConfig(cp_comm_strategy=strategy)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2, cp_handler=handler))
    assert_same(curve_in_blocks(accelerator), expected_curve())


@pytest.mark.thorough
@ranks(4)
@pytest.mark.parametrize("other", ["dp_replicate_size", "tp_size"])
def test_context_parallel_with_another_axis(rank: int, world: int, other: str) -> None:
    config = ParallelismConfig(cp_size=2, **{other: 2})
    if other == "tp_size":
        config.tp_handler.plan = TP_PLAN
    assert_same(curve_in_blocks(Accelerator(cpu=True, parallelism_config=config)), expected_curve())


def sharded(config: ParallelismConfig) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    return Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)


@pytest.mark.thorough
@ranks(4)
def test_sharded_tensor_parallel(rank: int, world: int) -> None:
    accelerator = sharded(tensor_parallel(tp_size=2, dp_shard_size=2))
    losses = loss_curve(accelerator, max_norm=0.5)
    assert_same(losses, expected_curve(max_norm=0.5))


@pytest.mark.thorough
@ranks(4)
def test_sharded_context_parallel(rank: int, world: int) -> None:
    accelerator = sharded(ParallelismConfig(cp_size=2, dp_shard_size=2))
    assert_same(curve_in_blocks(accelerator), expected_curve())


@pytest.mark.thorough
@ranks(4)
def test_sharded_sequence_parallel(rank: int, world: int) -> None:
    accelerator = sharded(ParallelismConfig(sp_size=2, sp_backend="torch", dp_shard_size=2))
    assert_same(curve_on_shards(accelerator), expected_curve())


# ---- saving and going on ----------------------------------------------------------------------------------------


def train(accelerator: Accelerator, prepared: Any, start: int, stop: int) -> list[float]:
    """Steps `start` to `stop` of the run whose losses are `expected_curve`."""
    model, optimizer, loader = prepared
    losses = []
    for number, batch in enumerate(batches(loader, stop)):
        if number >= start:
            loss = token_loss(model(batch["input_ids"]), shift(batch["labels"]))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
    return losses


def prepare_all(accelerator: Accelerator, seed: int) -> Any:
    model = make_model(seed=seed)
    per_process = BATCH_SIZE // accelerator.engine.data_shard().count
    return accelerator.prepare(model, ADAMW(model.parameters()), make_loader(per_process))


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@ranks(4)
@pytest.mark.parametrize("sizes", [{"tp_size": 2, "dp_replicate_size": 2}, {"tp_size": 4}, None])
def test_a_run_goes_on_in_another_layout(rank: int, world: int, tmp_path: Path, sizes: dict[str, int] | None) -> None:
    """With None, nothing but the batches is divided: a checkpoint is that of whole models."""
    accelerator = Accelerator(cpu=True, parallelism_config=tensor_parallel(tp_size=2, dp_replicate_size=2))
    losses = train(accelerator, prepare_all(accelerator, seed=0), 0, 10)
    accelerator.save_state(tmp_path / "checkpoint")
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, parallelism_config=tensor_parallel(**sizes) if sizes else None)
    prepared = prepare_all(accelerator, seed=1)
    accelerator.load_state(tmp_path / "checkpoint")
    losses += train(accelerator, prepared, 10, 20)
    assert losses == pytest.approx(expected_curve()[:20], abs=1e-5)


@pytest.mark.thorough
@ranks(4)
def test_a_sharded_run_goes_on_in_another_layout(rank: int, world: int, tmp_path: Path) -> None:
    accelerator = sharded(tensor_parallel(tp_size=2, dp_shard_size=2))
    losses = train(accelerator, prepare_all(accelerator, seed=0), 0, 10)
    accelerator.save_state(tmp_path / "checkpoint")
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, parallelism_config=tensor_parallel(tp_size=4))
    prepared = prepare_all(accelerator, seed=1)
    accelerator.load_state(tmp_path / "checkpoint")
    losses += train(accelerator, prepared, 10, 20)
    assert losses == pytest.approx(expected_curve()[:20], abs=1e-5)


@ranks(2)
def test_weights_of_another_model_are_listed(rank: int, world: int, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=tensor_parallel(tp_size=2))
    accelerator.prepare(make_model())
    accelerator.save_state(tmp_path / "checkpoint")
    accelerator.free_memory()
    accelerator.prepare(make_model(width=32))
    with pytest.raises(ValueError, match=r"'embedding.weight' is \(32, 16\), the model has \(32, 32\)"):
        accelerator.load_state(tmp_path / "checkpoint")


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@ranks(2)
@pytest.mark.parametrize("axis", ["tp", "cp", "sp"])
def test_half_precision_in_every_mode(rank: int, world: int, axis: str) -> None:
    """Coarser, but the same run."""
    config = ParallelismConfig(sp_backend="torch", **{f"{axis}_size": 2})
    if axis == "tp":
        config.tp_handler.plan = TP_PLAN
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", parallelism_config=config)
    losses = {"tp": loss_curve, "cp": curve_in_blocks, "sp": curve_on_shards}[axis](accelerator)
    assert losses == pytest.approx(expected_curve(), abs=0.1)
    assert losses[:5] == pytest.approx(expected_curve()[:5], abs=0.02)
