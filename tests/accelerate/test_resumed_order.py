"""A run that is resumed within an epoch reads the rest of that epoch, also on another number of processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler

from accel_state.libraries import is_torchdata_stateful_dataloader_available
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import gather_object, set_seed
from tests.support.ranks import POOL
from tests.support.resumed_runs import Cell, differences, found_in, look_at

NUM_SAMPLES = 48
GLOBAL_BATCH = 4
STEPS = 5
SAMPLERS: dict[str, Callable[[torch.Generator], dict[str, Any]]] = {
    "shuffled": lambda generator: {"shuffle": True},
    "own generator": lambda generator: {"sampler": RandomSampler(range(NUM_SAMPLES), generator=generator)},
    "loader's generator": lambda generator: {"shuffle": True, "generator": generator},
    "drawing": lambda generator: {"sampler": SubsetRandomSampler(range(NUM_SAMPLES))},
}


def read_part(world: int, folder: str, kind: str, dispatch: bool, step: str) -> None:
    """The first steps of an epoch, the next ones, or the rest, with a checkpoint between them."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    set_seed({"begin": 1, "resume": 2, "end": 3}[step], device_specific=True)
    generator = torch.Generator().manual_seed(torch.initial_seed())
    plain: Any = DataLoader(range(NUM_SAMPLES), GLOBAL_BATCH // world, **SAMPLERS[kind](generator))
    loader = accelerator.prepare(plain)
    if step == "begin":
        list(loader)
        rest = loader
    else:
        accelerator.load_state(folder)
        rest = accelerator.skip_first_batches(loader, STEPS if step == "resume" else 2 * STEPS)
    actual: list[int] = []
    for index, batch in enumerate(rest):
        actual += batch.tolist()
        torch.rand(accelerator.process_index + 1)  # as dropout does, of batches that differ in size
        if index + 1 == STEPS:
            accelerator.save_state(folder)
            break
    together = gather_object(actual)
    if accelerator.is_main_process:
        (Path(folder) / f"{step}.json").write_text(json.dumps(together))


read_part.body = read_part  # type: ignore[attr-defined]


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:The checkpoint .* was saved with num_processes")
@pytest.mark.parametrize(("kind", "dispatch"), [*((kind, False) for kind in SAMPLERS), ("shuffled", True)])
@pytest.mark.parametrize("worlds", [(2, 1, 2), (1, 2, 2)])
def test_every_sample_is_read_once(kind: str, dispatch: bool, worlds: tuple[int, ...], tmp_path: Path) -> None:
    folder = tmp_path / "state"
    read: list[int] = []
    for step, world in zip(("begin", "resume", "end"), worlds, strict=True):
        POOL.run(read_part, world, {"folder": str(folder), "kind": kind, "dispatch": dispatch, "step": step}, 60)
        read += json.loads((folder / f"{step}.json").read_text())
    assert sorted(read) == list(range(NUM_SAMPLES))
    assert read != sorted(read)


CELLS = [
    Cell(kind, 0, sharing, moment, way)
    for kind, sharing, moment, way in (
        ("sequential", "dispatch", "mid", "seedable"),
        ("shuffled", "shard", "second", "seedable"),
        ("shuffled", "split", "last_batch", "seedable"),
        ("shuffled", "shard", "boundary", "default"),
        ("shuffled", "dispatch", "last_batch", "stateful"),
        ("shuffled", "split", "second", "stateful"),
        ("weighted", "shard", "mid", "seedable"),
        ("weighted", "dispatch", "second", "stateful"),
        ("custom", "shard", "mid", "seedable"),
        ("custom", "shard", "last_batch", "default"),
        ("drawing", "shard", "mid", "default"),
        ("drawing", "dispatch", "boundary", "stateful"),
        ("batches", "dispatch", "second", "seedable"),
        ("batches", "shard", "mid", "stateful"),
        ("stream", "shard", "second", "seedable"),
        ("stream", "dispatch", "mid", "default"),
        ("stream", "split", "boundary", "stateful"),
        ("stream_with_state", "split", "mid", "stateful"),
        ("stream_with_state", "dispatch", "second", "stateful"),
        ("shuffled", "shard", "accumulating", "seedable"),
        ("drawing", "dispatch", "accumulating", "default"),
        ("weighted", "split", "accumulating", "stateful"),
        ("stream", "dispatch", "accumulating", "stateful"),
        ("sequential", "split", "mid", "switch"),
        ("shuffled", "shard", "second", "switch"),
        ("weighted", "dispatch", "mid", "switch"),
        ("custom", "shard", "last_batch", "switch"),
        ("drawing", "shard", "accumulating", "switch"),
        ("batches", "dispatch", "mid", "switch"),
        ("stream", "dispatch", "second", "switch"),
        ("stream_with_state", "shard", "mid", "switch"),
        ("augmented", "shard", "mid", "switch"),
        ("augmented", "dispatch", "second", "switch"),
        ("augmented", "split", "mid", "seedable"),
        ("shuffled", "shard", "mid", "by_hand"),
        ("stream", "split", "second", "by_hand"),
        ("drawing", "dispatch", "mid", "dropping"),
        ("augmented", "dispatch", "accumulating", "default"),
    )
]
"""A part of the matrix of `tests.support.resumed_runs`."""


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_is_the_one_that_never_stopped(world: int, tmp_path: Path) -> None:
    has_torchdata = is_torchdata_stateful_dataloader_available()
    cells = [cell for cell in CELLS if has_torchdata or cell.way != "stateful"]
    values = {"cells": [asdict(cell) for cell in cells], "folder": str(tmp_path)}
    POOL.run(look_at, world, values, 120)
    assert found_in(tmp_path, cells, world) == {}


@pytest.mark.takes_turns
@pytest.mark.skipif("coverage" in sys.modules, reason="forked workers now and then die under coverage")
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "cell",
    [
        Cell("shuffled", 2, "shard", "mid", "default"),
        Cell("shuffled", 2, "shard", "mid", "stateful"),
        Cell("augmented", 2, "dispatch", "second", "switch"),
        Cell("stream", 2, "shard", "boundary", "switch", persistent=True),
        Cell("augmented", 2, "split", "last_batch", "default", persistent=True),
    ],
    ids=str,
)
def test_workers_make_no_difference(cell: Cell, tmp_path: Path) -> None:
    if cell.way == "stateful":
        pytest.importorskip("torchdata")
    assert differences(cell, tmp_path) == ""
