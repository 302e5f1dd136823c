"""Checks of checkpoints: saving, loading, and resuming a run."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.test_utils.scripts.checks.check import (
    Process,
    SkippedError,
    checks,
    make_accelerator,
    need_data_parallelism,
    same,
)
from accelerate.test_utils.scripts.checks.training import assert_same, make_data, make_model, make_optimizer, train

BATCHES = 6  # of a process in an epoch
HALF = 3


class Counter:
    """An object of the user that is registered for checkpoints."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        """Return what to save."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the saved count."""
        self.count = state["count"]


def make_run(process: Process) -> tuple[Accelerator, Any, Counter]:
    """Prepare a run from the beginning: the accelerator, (model, optimizer, loader), and a counter."""
    need_data_parallelism(process)
    accelerator = make_accelerator(mixed_precision="no")
    model = make_model()
    loader = DataLoader(make_data(2 * process.world * BATCHES), batch_size=2)
    prepared = accelerator.prepare(model, make_optimizer(model), loader)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, prepared, counter


def folder_of(process: Process, name: str) -> str:
    """A folder shared by all processes."""
    if process.folder is None:
        raise SkippedError("the machines do not share a temporary folder")
    return os.path.join(process.folder, name)


def loading(process: Process) -> None:
    """Loading restores parameters, RNG states, and registered objects."""
    folder = folder_of(process, "state")
    accelerator, prepared, counter = make_run(process)
    counter.count = 5
    before = clone(accelerator.get_state_dict(prepared[0]))
    accelerator.save_state(folder)
    expected = torch.rand(3).tolist()
    train(accelerator, prepared)
    counter.count = 0
    accelerator.load_state(folder)
    same(torch.rand(3).tolist(), expected, "random numbers")
    same(counter.count, 5, "the user's object")
    state_dict = accelerator.get_state_dict(prepared[0])
    if accelerator.is_main_process:
        assert_same(state_dict, before, tolerance=0)


def resuming(process: Process) -> None:
    """A run that was stopped in the middle of an epoch and resumed ends as one that was not."""
    folder = folder_of(process, "half")
    accelerator, prepared, _ = make_run(process)
    train(accelerator, prepared, steps=HALF)
    accelerator.save_state(folder)
    train(accelerator, prepared, skipped=HALF)
    expected = clone(accelerator.get_state_dict(prepared[0]))
    accelerator, prepared, _ = make_run(process)
    accelerator.load_state(folder)
    train(accelerator, prepared, skipped=HALF)
    state_dict = accelerator.get_state_dict(prepared[0])
    if accelerator.is_main_process:
        assert_same(state_dict, expected, tolerance=1e-6)


def saving_models(process: Process) -> None:
    """A saved model is a plain file of weights."""
    folder = folder_of(process, "model")
    accelerator, prepared, _ = make_run(process)
    accelerator.save_model(prepared[0], folder)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        from safetensors.torch import load_file

        assert_same(load_file(os.path.join(folder, "model.safetensors")), make_model().state_dict(), tolerance=0)


def clone(state: dict[str, Any]) -> dict[str, Any]:
    """Clone tensors, which would change with the model otherwise."""
    return {name: value.detach().clone() for name, value in state.items()}


CHECKPOINTS = checks("checkpoints", save_and_load=loading, resume=resuming, save_model=saving_models)
