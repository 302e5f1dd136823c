"""What a launcher with `--hang_timeout` counts as progress: everything that a training loop passes again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_ops.collectives.objects import broadcast_object_list
from accel_ops.collectives.tensors import broadcast
from accel_state import supervision
from accelerate import Accelerator, DataLoaderConfiguration
from tests.support.ranks import ranks


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted = [0]
    monkeypatch.setattr(supervision, "counter", counted)
    return counted


def check_all(calls: dict[str, Callable[[], object]]) -> None:
    """Each of the calls must be seen by the launcher."""
    counted = supervision.counter = [0]
    unseen = []
    try:
        for name, call in calls.items():
            before = counted[0]
            call()
            if counted[0] == before:
                unseen.append(name)
    finally:
        supervision.counter = None
    assert unseen == []


def training_calls(accelerator: Accelerator, folder: Path) -> dict[str, Callable[[], object]]:
    layer = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    return {
        "backward": lambda: accelerator.backward(model(torch.ones(1, 2)).sum()),
        "step": optimizer.step,
        "save_state": lambda: accelerator.save_state(str(folder / "state")),
        "load_state": lambda: accelerator.load_state(str(folder / "state")),
        "save_model": lambda: accelerator.save_model(model, str(folder / "model")),
        "save": lambda: accelerator.save({"a": 1}, str(folder / "object")),
    }


@ranks(2)
def test_every_collective_and_every_part_of_a_step_is_progress(rank: int, world: int, tmp_path: Path) -> None:
    accelerator = Accelerator()
    check_all({
        "wait_for_everyone": accelerator.wait_for_everyone,
        "gather": lambda: accelerator.gather(torch.ones(1)),
        "gather_for_metrics": lambda: accelerator.gather_for_metrics(["a"], use_gather_object=True),
        "reduce": lambda: accelerator.reduce(torch.ones(1)),
        "pad_across_processes": lambda: accelerator.pad_across_processes(torch.ones(1 + rank)),
        "broadcast": lambda: broadcast(torch.ones(1)),
        "broadcast_object_list": lambda: broadcast_object_list([rank]),
        "check_trigger": accelerator.check_trigger,
        **training_calls(accelerator, tmp_path),
    })  # fmt: skip


@ranks(2)
@pytest.mark.parametrize("dispatch_batches", [False, True])
def test_every_batch_is_progress(rank: int, world: int, dispatch_batches: bool) -> None:
    config = DataLoaderConfiguration(dispatch_batches=dispatch_batches)
    loader = Accelerator(dataloader_config=config).prepare(DataLoader(list(range(12)), batch_size=2))  # type: ignore[arg-type]
    batches: Iterator[object] = iter(loader)
    check_all({f"batch {index}": lambda: next(batches) for index in range(3)})


def test_one_process_reports_as_well(tmp_path: Path) -> None:
    """It is watched too where torch's agent started it."""
    check_all(training_calls(Accelerator(cpu=True), tmp_path))


def test_batches_that_are_skipped_are_progress(counter: list[int]) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(list(range(12)), batch_size=2))  # type: ignore[arg-type]
    loader.skip_batches = 4
    next(iter(loader))
    assert counter == [5]
