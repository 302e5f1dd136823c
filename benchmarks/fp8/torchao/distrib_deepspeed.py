"""FP8 with torchao under DeepSpeed, ZeRO stages 1 to 3: `distrib_deepspeed.py [STAGE]`."""

import sys
from functools import partial
from typing import Any

import deepspeed
import torch
from fp8_curves import BATCH, Step, compare, convert_by_hand, make_model, make_optimizer

from accelerate import DeepSpeedPlugin


def config(stage: int) -> dict[str, Any]:
    """DeepSpeed's configuration of both curves."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }


def settings(stage: int) -> dict[str, Any]:
    """The plugin of this configuration."""
    return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config(stage))}


def by_hand(stage: int) -> Step:
    """Convert the model, then hand it to DeepSpeed."""
    model = convert_by_hand(make_model())
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=config(stage))

    def step(batch: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = (engine(batch.bfloat16()).float() - target).square().mean()
        engine.backward(loss)
        engine.step()
        return loss

    return step


if __name__ == "__main__":
    stage = int(sys.argv[1]) if sys.argv[1:] else 2
    compare(partial(by_hand, stage), partial(settings, stage))
