"""transformers' Trainer with a DeepSpeed configuration: on two processes as on one, and going on."""

from __future__ import annotations

import importlib.util
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients import tiny
from tests.clients.trainer import history, make_trainer
from tests.support.leaks import reset_state
from tests.support.ranks import ranks

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("transformers", "deepspeed")),
        reason="needs transformers and deepspeed",
    ),
    pytest.mark.filterwarnings("default"),  # the libraries have their own
]
deepspeed_ranks = partial(ranks, timeout=300.0)  # importing DeepSpeed takes seconds in every process


def config(stage: int) -> dict[str, Any]:
    """A configuration that leaves to the library what the library knows."""
    adamw = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "optimizer": {"type": "AdamW", "params": adamw},
    }


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one process with batches of eight, without DeepSpeed."""
    reset_state()
    trainer = make_trainer(
        tmp_path_factory.mktemp("one"),
        per_device_train_batch_size=8,
        max_steps=6,
        lr_scheduler_type="constant",
        learning_rate=5e-3,
    )
    trainer.train()
    reset_state()
    return history(trainer, "loss")


@pytest.mark.thorough
@deepspeed_ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_two_processes_train_like_one(rank: int, stage: int, of_one_process: list[float], tmp_path: Path) -> None:
    import transformers
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from accelerate.state import AcceleratorState, GradientState

    warnings.simplefilter("ignore")
    common = {"max_steps": 6, "save_steps": 3, "learning_rate": 5e-3, "deepspeed": config(stage)}
    for options in ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}):
        AcceleratorState._reset_state(), GradientState._reset_state()
        trainer = make_trainer(tmp_path, **{**common, **options})
        assert trainer.accelerator.engine.name == "deepspeed"
        trainer.train()
        assert history(trainer, "loss") == pytest.approx(of_one_process, abs=1e-4)
    whole = history(trainer, "loss")
    trainer.save_model(str(tmp_path / "saved"))
    AcceleratorState._reset_state(), GradientState._reset_state()
    resumed = make_trainer(tmp_path, **common, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert history(resumed, "loss")[-3:] == whole[-3:]
    unset_hf_deepspeed_config()  # or the library would divide the models that are made from here on
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    batch = tiny.pad([tiny.Sequences(4)[index] for index in range(4)])
    with torch.no_grad():
        assert loaded(**batch).loss < tiny.llama()(**batch).loss
