"""What runs at every step: few calls of ours, and none that asks what cannot have changed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator

OURS = "accel"  # begins the names of our packages
NEVER = {"signature", "find_spec", "find_module", "getmodule", "is_deepspeed_available", "is_lomo_available", "getenv"}

# How many Python functions of ours one step of each sort may enter
BUDGETS = {"plain": 7, "accumulate": 17, "clip": 16, "bf16": 9}


def calls_of(function: Callable[[], None]) -> Counter[str]:
    """The Python functions of ours that `function` entered, and those of others that must not be."""
    actual: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code.co_name in NEVER or str(frame.f_globals.get("__name__")).startswith(OURS):
                actual[code.co_qualname] += 1

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return actual


def make_step(case: str) -> Callable[[], None]:
    arguments: dict[str, Any] = {
        "accumulate": {"gradient_accumulation_steps": 2},
        "bf16": {"mixed_precision": "bf16"},
    }.get(case, {})
    accelerator = Accelerator(cpu=True, **arguments)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    parameters, inputs = list(model.parameters()), torch.ones(2, 2)

    def finish() -> None:
        accelerator.backward(model(inputs).sum())
        if case == "clip":
            accelerator.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def step() -> None:
        if case == "accumulate":
            with accelerator.accumulate(model):
                finish()
        else:
            finish()

    return step


@pytest.mark.parametrize("case", BUDGETS)
def test_a_step_enters_few_functions(case: str) -> None:
    step = make_step(case)
    for _ in range(4):  # the first ones are looked at
        step()
    for _ in range(2):  # with accumulation: one that holds back and one that steps
        calls = calls_of(step)
        assert NEVER.isdisjoint(name.rpartition(".")[2] for name in calls)
        assert not [name for name in calls if name.endswith("State.__init__")], calls
        assert calls.total() <= BUDGETS[case], calls


def test_the_counter_counts() -> None:
    accelerator = Accelerator(cpu=True)
    assert calls_of(lambda: accelerator.wait_for_everyone())["Accelerator.wait_for_everyone"] == 1
