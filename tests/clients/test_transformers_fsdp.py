"""transformers' Trainer trains with sharded parameters, saves, and goes on."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import accelerate.utils
from tests.support.ranks import ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is not None
        and not hasattr(accelerate.utils, "DeepSpeedSchedulerWrapper"),
        reason="beside DeepSpeed, transformers imports a name that accelerate.utils does not have yet",
    ),
]


def make_trainer(folder: Path, version: int, form: str, steps: int) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    sequences = [(torch.arange(start, start + 16) * 3) % 64 for start in range(32)]
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        max_steps=steps,
        save_steps=4,
        logging_steps=1,
        lr_scheduler_type="constant",
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        fsdp="full_shard auto_wrap",
        fsdp_config={"version": version, "state_dict_type": form, "use_orig_params": True},
    )
    return transformers.Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=arguments,
        train_dataset=[{"input_ids": tokens, "labels": tokens} for tokens in sequences],
    )


def losses(trainer: Any) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("version", "form"), [(1, "FULL_STATE_DICT"), (2, "SHARDED_STATE_DICT")])
@ranks(2)
def test_trainer_trains_saves_and_goes_on(rank: int, world: int, version: int, form: str, tmp_path: Path) -> None:
    import warnings

    warnings.simplefilter("ignore")
    whole = make_trainer(tmp_path / "whole", version, form, steps=8)
    assert whole.accelerator.engine.name == f"fsdp{version}"
    whole.train()
    resumed = make_trainer(tmp_path / "whole", version, form, steps=8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    expected, found = losses(whole), losses(resumed)
    assert expected[8] < expected[1]
    for step in range(5, 9):
        assert abs(found[step] - expected[step]) < 1e-5
