"""DeepSpeed reaches the loss curve of one process at every stage, and goes on from its checkpoints."""

from __future__ import annotations

import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import load_checkpoint_in_model
from tests.parity.test_fsdp import ADAMW, BATCH_SIZE, STEPS, assert_same, train
from tests.support.leaks import reset_state
from tests.support.ranks import ranks
from tests.support.tiny_transformer import make_loader, make_model, reference_curve

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")  # importing it takes seconds
deepspeed_ranks = partial(ranks, timeout=300.0)  # importing DeepSpeed takes seconds in every process
STAGES = (0, 1, 2, 3)


def quiet() -> None:
    """DeepSpeed calls collectives under their old names, and says what it does."""
    warnings.simplefilter("ignore", FutureWarning)


def new_accelerator(stage: int, **settings: Any) -> Accelerator:
    quiet()
    steps = settings.pop("gradient_accumulation_steps", 1)
    precision = settings.pop("mixed_precision", "no")
    plugin = DeepSpeedPlugin(zero_stage=stage, **settings)
    return Accelerator(cpu=True, deepspeed_plugin=plugin, gradient_accumulation_steps=steps, mixed_precision=precision)


def prepare(accelerator: Accelerator, seed: int = 0) -> tuple[Any, Any, Any]:
    model = make_model(seed=seed)
    return accelerator.prepare(model, ADAMW(model.parameters()), make_loader(BATCH_SIZE // accelerator.num_processes))


def start_over(accelerator: Accelerator) -> None:
    accelerator.free_memory()
    reset_state()


@deepspeed_ranks(2)
def test_auto_values_are_those_of_the_fold_that_is_prepared(rank: int, world: int) -> None:
    accelerator = new_accelerator(2)
    for batch_size in (4, 2):
        model = make_model()
        accelerator.prepare(model, ADAMW(model.parameters()), make_loader(batch_size))
        config = accelerator.deepspeed_plugin.deepspeed_config
        assert (config["train_micro_batch_size_per_gpu"], config["train_batch_size"]) == (batch_size, 2 * batch_size)
        accelerator.free_memory()


@pytest.mark.thorough
@deepspeed_ranks(2)
def test_every_stage_has_the_curve_of_one_process(rank: int, world: int) -> None:
    expected = reference_curve(STEPS, BATCH_SIZE, ADAMW, max_norm=0.5)
    for stage in STAGES:
        accelerator = new_accelerator(stage, gradient_clipping=0.5)
        assert accelerator.engine.name == "deepspeed"
        losses = train(accelerator, *prepare(accelerator), steps=STEPS, max_norm=0.5)
        assert_same(losses, expected)
        start_over(accelerator)


@pytest.mark.thorough
@deepspeed_ranks(2)
def test_goes_on_from_a_checkpoint(rank: int, world: int, tmp_path: Path) -> None:
    for name, settings in {
        "0": {"stage": 0},
        "1": {"stage": 1},
        "2": {"stage": 2, "mixed_precision": "bf16"},
        "3": {"stage": 3},
    }.items():
        accelerator = new_accelerator(**settings)
        model, optimizer, loader = prepare(accelerator)
        train(accelerator, model, optimizer, loader, steps=5)
        accelerator.save_state(tmp_path / name)
        expected = train(accelerator, model, optimizer, loader, steps=5)
        start_over(accelerator)
        accelerator = new_accelerator(**settings)
        model, optimizer, loader = prepare(accelerator, seed=7)
        accelerator.load_state(tmp_path / name)
        assert train(accelerator, model, optimizer, loader, steps=5) == expected
        start_over(accelerator)


@pytest.mark.thorough
@deepspeed_ranks(2)
def test_whole_weights_come_out_of_every_stage(rank: int, world: int, tmp_path: Path) -> None:
    heads = []
    for stage in STAGES:
        accelerator = new_accelerator(stage)
        model, optimizer, loader = prepare(accelerator)
        train(accelerator, model, optimizer, loader, steps=3)
        state = accelerator.get_state_dict(model)
        accelerator.save_model(model, tmp_path / str(stage))
        if rank == 0:
            whole = make_model(seed=3)
            load_checkpoint_in_model(whole, str(tmp_path / str(stage)))
            for name, tensor in whole.state_dict().items():
                torch.testing.assert_close(state[name], tensor, rtol=0, atol=0)
            heads.append(state["head.weight"])
            torch.testing.assert_close(heads[-1], heads[0], rtol=1e-5, atol=1e-6)
            assert heads[-1].untyped_storage().nbytes() == heads[-1].nbytes
        start_over(accelerator)
    forbidding = {
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False},
        "train_micro_batch_size_per_gpu": BATCH_SIZE // world,
    }
    quiet()
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=forbidding))
    model, *_ = prepare(accelerator)
    with pytest.raises(ValueError, match="stage3_gather_16bit_weights_on_model_save is false"):
        accelerator.get_state_dict(model)
