"""Checks that DeepSpeed's ZeRO 3 works in a process group that the program has initialized before.

By itself: `accelerate launch --num_processes 2 .../external_deps/test_zero3_integration.py`. Needs DeepSpeed.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from accelerate.state import PartialState
from accelerate.test_utils.scripts.checks.check import Process, SkippedError, checks, make_accelerator, same
from accelerate.test_utils.scripts.checks.running import run_checks
from accelerate.test_utils.scripts.checks.sentences import make_loaders, make_reader, train_epoch
from accelerate.test_utils.scripts.external_deps.needs import need_deepspeed
from accelerate.utils import DeepSpeedPlugin, DistributedType, set_seed


def init_torch_dist_then_launch_deepspeed(process: Process) -> None:
    """A plugin given to a program whose process group exists already."""
    need_deepspeed(process)
    if process.world == 1:
        raise SkippedError("needs several processes")
    assert dist.is_initialized(), "there is no process group, although there are several processes"
    group = dist.group.WORLD
    accelerator = make_accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=1))
    same(accelerator.distributed_type, DistributedType.DEEPSPEED, "distributed type")
    same(dist.group.WORLD is group, True, "the process group is the one there was")
    same(PartialState().num_processes, process.world, "number of processes")


def training(process: Process) -> None:
    """Training changes the sharded parameters, and their full tensors are identical on all ranks."""
    need_deepspeed(process)
    plugin = DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=1, zero3_save_16bit_model=True)
    accelerator = make_accelerator(deepspeed_plugin=plugin)
    set_seed(0)
    model = make_reader()
    before = model.state_dict()["head.weight"].clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    loader, _ = make_loaders(trained=64)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    train_epoch(accelerator, model, optimizer, scheduler, loader)
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        after = weights["head.weight"].float().cpu()
        assert after.shape == before.shape, f"the full weight has shape {tuple(after.shape)}"
        assert not torch.equal(after, before), "training did not change the weight"


ZERO3 = checks("ZeRO 3", in_the_group_of_the_program=init_torch_dist_then_launch_deepspeed, training=training)


def main() -> int:
    """Run these checks, print a table, and return the exit status: 0 when none failed."""
    return run_checks(ZERO3)


if __name__ == "__main__":
    sys.exit(main())
