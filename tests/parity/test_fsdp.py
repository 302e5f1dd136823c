"""Sharded training reaches the loss curve of one process, and goes on from checkpoints on any number of processes."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_cli.to_fsdp2 import convert_config_to_fsdp2
from accel_state.environment import patch_environment
from accel_state.mesh import ParallelismConfig
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from accel_state.settings.parallelism import TorchTensorParallelConfig
from accelerate import Accelerator
from tests.support.leaks import reset_state
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


def fsdp(version: int, **options: Any) -> FullyShardedDataParallelPlugin:
    options = {"auto_wrap_policy": "transformer_based_wrap", **options}
    if version == 1:
        options = {"use_orig_params": True, **options}
    return FullyShardedDataParallelPlugin(fsdp_version=version, **options)


def prepare(accelerator: Accelerator, **options: Any) -> tuple[Any, Any, Any]:
    config = accelerator.parallelism_config
    places = accelerator.num_processes if config is None else config.data_parallel_size
    model = make_model(**options)
    optimizer = ADAMW(model.parameters())
    return accelerator.prepare(model, optimizer, make_loader(BATCH_SIZE // places))


def train(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, steps: int, max_norm: float | None = None
) -> list[float]:
    losses = []
    for batch in batches(loader, steps):
        loss = token_loss(model(batch["input_ids"]), shift(batch["labels"]))
        accelerator.backward(loss)
        if max_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def assert_same(losses: list[float], expected: list[float], tolerance: float = 1e-5) -> None:
    worst = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
    assert worst < tolerance, f"losses differ by up to {worst}"


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.parametrize("version", [1, 2])
@ranks(2)
def test_sharded_curve_is_that_of_one_process(rank: int, world: int, version: int) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=fsdp(version))
    losses = train(accelerator, *prepare(accelerator), steps=STEPS, max_norm=0.5)
    assert losses[-1] < losses[0] / 1.5
    assert_same(losses, reference_curve(STEPS, BATCH_SIZE, ADAMW, max_norm=0.5))


@pytest.mark.thorough
@ranks(4)
def test_hybrid_curve_is_that_of_one_process(rank: int, world: int) -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=fsdp(2), parallelism_config=config)
    losses = train(accelerator, *prepare(accelerator), steps=STEPS)
    assert_same(losses, reference_curve(STEPS, BATCH_SIZE, ADAMW))


def save_half(world: int, version: int, folder: Path, form: str, **options: Any) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=fsdp(version, state_dict_type=form))
    parts = prepare(accelerator, **options)
    train(accelerator, *parts, steps=16)
    accelerator.save_state(folder)


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("version", [1, 2])
@ranks(2)
def test_goes_on_from_a_checkpoint(rank: int, world: int, version: int, form: str, tmp_path: Path) -> None:
    save_half(world, version, tmp_path / "state", form)
    Accelerator().free_memory()
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepare(accelerator, seed=1)
    accelerator.load_state(tmp_path / "state")
    losses = train(accelerator, model, optimizer, loader, steps=8)
    assert_same(losses, reference_curve(24, BATCH_SIZE, ADAMW)[16:])


@pytest.mark.thorough
@ranks(2)
def test_a_converted_configuration_trains_to_the_same_losses(rank: int, world: int) -> None:
    config = {
        "fsdp_config": {
            "fsdp_version": 1,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "Block",
            "fsdp_sharding_strategy": "FULL_SHARD",
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_sync_module_states": True,
            "fsdp_use_orig_params": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    }
    curves = []
    for settings in (config, convert_config_to_fsdp2(copy.deepcopy(config))):
        names = {key: key.upper().replace("LAYER_CLS", "CLS") for key in settings["fsdp_config"]}
        with patch_environment(**{name: str(settings["fsdp_config"][key]) for key, name in names.items()}):
            accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
        curves.append(train(accelerator, *prepare(accelerator), steps=10))
        assert accelerator.engine.name == f"fsdp{len(curves)}"
        accelerator.free_memory()
        reset_state()
    assert_same(*curves)


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.parametrize("version", [1, 2])
@ranks(2)
def test_several_models_in_one_checkpoint(rank: int, world: int, version: int, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=fsdp(version))
    first, one, loader = prepare(accelerator)
    second = make_model(seed=5, width=32)
    second, other = accelerator.prepare(second, ADAMW(second.parameters()))
    train(accelerator, first, one, loader, steps=2)
    train(accelerator, second, other, loader, steps=2)
    accelerator.save_state(tmp_path / "state")
    expected = [train(accelerator, *pair, loader, steps=3) for pair in ((first, one), (second, other))]
    accelerator.load_state(tmp_path / "state")
    actual = [train(accelerator, *pair, loader, steps=3) for pair in ((first, one), (second, other))]
    for mine, theirs in zip(actual, expected, strict=True):
        assert_same(mine, theirs, 1e-6)


@pytest.mark.thorough
@ranks(4)
def test_shards_of_cut_layers(rank: int, world: int, tmp_path: Path) -> None:
    handler = TorchTensorParallelConfig(plan=TP_PLAN)
    config = ParallelismConfig(dp_shard_size=2, tp_size=2, tp_handler=handler)
    accelerator = Accelerator(cpu=True, fsdp_plugin=fsdp(2), parallelism_config=config)
    model, optimizer, loader = prepare(accelerator)
    expected = reference_curve(24, BATCH_SIZE, ADAMW, max_norm=0.5)
    assert_same(train(accelerator, model, optimizer, loader, steps=16, max_norm=0.5), expected[:16])
    accelerator.save_state(tmp_path / "state")
    train(accelerator, model, optimizer, loader, steps=3)
    accelerator.load_state(tmp_path / "state")
    assert_same(train(accelerator, model, optimizer, loader, steps=8, max_norm=0.5), expected[16:])
