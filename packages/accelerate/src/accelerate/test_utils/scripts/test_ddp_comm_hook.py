"""Checks that gradients all-reduced with a compressing communication hook are close to their mean.

By itself: `accelerate launch --num_processes 2 .../test_utils/scripts/test_ddp_comm_hook.py`.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate.test_utils.scripts.checks.check import Check, Process, SkippedError, make_accelerator, same
from accelerate.test_utils.scripts.checks.running import run_checks
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

FEATURES = 8
HOOKS = DDPCommunicationHookType
NOT_COMPRESSED = {"start_powerSGD_iter": 2}  # nothing is compressed before this step


def gradients(process: Process, handler: DistributedDataParallelKwargs | None) -> list[torch.Tensor]:
    """The gradients of a replica after a backward pass; every process has another batch."""
    accelerator = make_accelerator(mixed_precision="no", kwargs_handlers=[handler] if handler else [])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 1))
    model = accelerator.prepare(layer)
    if not isinstance(model, DistributedDataParallel):
        raise SkippedError("needs replicas on several processes (MULTI_CPU, MULTI_GPU, ...)")
    batch = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(process.rank))
    accelerator.backward(model(batch.to(accelerator.device)).square().mean())
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def nearly_the_mean(process: Process, *, hook: Any, wrapper: Any, options: dict[str, Any], tolerance: float) -> None:
    """Compare with gradients that are not compressed."""
    handler = DistributedDataParallelKwargs(comm_hook=hook, comm_wrapper=wrapper, comm_state_option=options)
    expected = gradients(process, None)
    actual = gradients(process, handler)
    same(len(actual), len(expected), "number of gradients")
    for one, other in zip(actual, expected, strict=True):
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance), f"{one.tolist()} is not {other.tolist()}"


def rows() -> list[Check]:
    """One check for each hook, by itself and inside of those that change the precision."""
    checks = []
    for hook in (HOOKS.NO, HOOKS.FP16, HOOKS.BF16, HOOKS.POWER_SGD, HOOKS.BATCHED_POWER_SGD):
        sgd = hook in (HOOKS.POWER_SGD, HOOKS.BATCHED_POWER_SGD)
        for wrapper in (HOOKS.NO, HOOKS.FP16, HOOKS.BF16) if sgd else (HOOKS.NO,):
            rounds = HOOKS.BF16 in (hook, wrapper) or HOOKS.FP16 in (hook, wrapper)
            run = partial(
                nearly_the_mean,
                hook=hook,
                wrapper=wrapper,
                options=NOT_COMPRESSED if sgd else {},
                tolerance=2e-2 if rounds else 1e-6,
            )
            name = hook.value if wrapper is HOOKS.NO else f"{hook.value} in {wrapper.value}"
            checks.append(Check("communication hooks", name, run))
    return checks


COMMUNICATION = tuple(rows())


def main() -> int:
    """Run these checks, print a table, and return the exit status: 0 when none failed."""
    return run_checks(COMMUNICATION)


if __name__ == "__main__":
    sys.exit(main())
