"""Checks of process control: splitting inputs, functions for one process, and triggers."""

from __future__ import annotations

import os

import torch

from accelerate.state import PartialState
from accelerate.test_utils.scripts.checks.check import Process, checks, make_accelerator, same
from accelerate.utils import gather_object


def settings_arrive(process: Process) -> None:
    """An accelerator has the settings of the launch."""
    accelerator = make_accelerator()
    same(accelerator.distributed_type, process.kind, "distributed type")
    same(accelerator.mixed_precision, os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), "mixed precision")
    same(accelerator.num_processes, process.world, "number of processes")


def splitting_lists(process: Process) -> None:
    """Every item goes to one process, in order, and their numbers differ by one at most."""
    state = PartialState()
    items = list(range(2 * process.world + 1))
    with state.split_between_processes(items) as part:
        parts = gather_object([part])
    same([item for part in parts for item in part], items, "items")
    same(max(map(len, parts)) - min(map(len, parts)) <= 1, True, f"lengths {[len(part) for part in parts]} are even")


def splitting_with_padding(process: Process) -> None:
    """With padding, all splits have the same length."""
    state = PartialState()
    items = list(range(2 * process.world + 1))
    with state.split_between_processes(items, apply_padding=True) as part:
        lengths = gather_object([len(part)])
    same(set(lengths), {3 if process.world > 1 else len(items)}, "lengths")


def splitting_structures(process: Process) -> None:
    """Dictionaries and tensors are split, too."""
    state = PartialState()
    rows = {
        "x": torch.arange(2 * process.world, device=state.device),
        "name": [str(i) for i in range(2 * process.world)],
    }
    with state.split_between_processes(rows) as part:
        same(part["x"].tolist(), [2 * process.rank, 2 * process.rank + 1], "tensor")
        same(part["name"], [str(2 * process.rank), str(2 * process.rank + 1)], "list")


def one_process_only(process: Process) -> None:
    """Decorated functions run on the process they are for."""
    accelerator = make_accelerator()
    ran: list[str] = []
    accelerator.on_main_process(ran.append)("main")
    accelerator.on_last_process(ran.append)("last")
    calls = gather_object([ran])
    expected: list[list[str]] = [[] for _ in range(process.world)]
    expected[0].append("main")
    expected[-1].append("last")
    same(calls, expected, "who ran")


def triggering(process: Process) -> None:
    """A trigger that one process sets is seen by all, once."""
    accelerator = make_accelerator()
    same(accelerator.check_trigger(), False, "before it is set")
    if accelerator.is_last_process:
        accelerator.set_trigger()
    same(accelerator.check_trigger(), True, "after it is set")
    same(accelerator.check_trigger(), False, "after it was seen")


CONTROL = (
    *checks("launch", settings_arrive=settings_arrive),
    *checks(
        "split_between_processes",
        lists=splitting_lists,
        with_padding=splitting_with_padding,
        dictionaries_and_tensors=splitting_structures,
    ),
    *checks("control", one_process_only=one_process_only, triggers=triggering),
)
