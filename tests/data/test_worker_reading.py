"""Random augmentation in loader workers: the rest of an epoch that was stopped anywhere is the same."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from accel_data import workers
from accelerate import Accelerator
from accelerate.utils import set_seed

pytestmark = [
    pytest.mark.skipif("coverage" in sys.modules, reason="forked workers now and then die under coverage"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes"),
]
NUM_SAMPLES = 22


class Noisy(Dataset[torch.Tensor]):
    """Each sample with noise of three generators."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return torch.tensor([float(index), *noise], dtype=torch.float64)


class Whole(Noisy):
    """Reads a batch at once, and cannot read an empty one."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        assert indices
        return [self[index] for index in indices]


class Listed(Noisy):
    """For a sampler of lists, without automatic batches."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.stack([super(Listed, self).__getitem__(one) for one in index])


class Late(Noisy):
    """Draws from the third batch of each worker on, and from numpy alone."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(np.random.rand()) if index > 11 else 0.0], dtype=torch.float64)


class Pair:
    """A batch of a type of its own."""

    def __init__(self, samples: list[torch.Tensor]) -> None:
        self.rows = torch.stack(samples)


def seeded_by_number(worker: int) -> None:
    """A program's own seeding of workers."""
    np.random.seed(40 + worker)


def pair(samples: list[torch.Tensor]) -> Pair:
    return Pair(samples)


CASES: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=3),
    "seeded by the program": lambda: DataLoader(
        Noisy(), batch_size=2, num_workers=3, worker_init_fn=seeded_by_number, collate_fn=pair
    ),
    "read at once": lambda: DataLoader(Whole(), batch_size=2, shuffle=True, num_workers=3),
    "lists of a sampler": lambda: DataLoader(
        Listed(), batch_size=None, sampler=BatchSampler(SequentialSampler(range(NUM_SAMPLES)), 2, False), num_workers=3
    ),
    "out of order": lambda: DataLoader(Noisy(), batch_size=2, num_workers=1, in_order=False),
    "drawing late": lambda: DataLoader(Late(), batch_size=2, num_workers=2),
    "persistent": lambda: DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=3, persistent_workers=True),
}


def read(loader: Any) -> list[list[list[float]]]:
    return [getattr(batch, "rows", batch).tolist() for batch in loader]


@pytest.mark.takes_turns
@pytest.mark.sample(3)
@pytest.mark.parametrize("stop", [1, 5, 6])  # worker 1, 2 or 0 of three has the next turn, and either of two
@pytest.mark.parametrize("case", CASES)
def test_the_rest_of_an_epoch_and_the_next_one_are_the_same(case: str, stop: int, tmp_path: Path) -> None:
    set_seed(1)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(CASES[case]())
    rest: list[Any] = []
    for step, batch in enumerate(loader):
        if step >= stop:
            rest.append(getattr(batch, "rows", batch).tolist())
        if step + 1 == stop:
            accelerator.save_state(tmp_path / "state")
    following = read(loader)
    del loader
    accelerator.free_memory()  # persistent workers end at once where their iterator does, not when it is collected
    set_seed(2)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(CASES[case]())
    accelerator.load_state(tmp_path / "state")
    assert read(accelerator.skip_first_batches(loader, stop)) == rest
    assert read(loader) == following


class Deadly(Noisy):
    """Ends the worker that reads an empty batch."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        if not indices:
            os._exit(1)
        return [self[index] for index in indices]


@pytest.mark.takes_turns
def test_a_worker_that_dies_is_not_passed_over(tmp_path: Path) -> None:
    def prepared() -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True)
        return accelerator, accelerator.prepare(DataLoader(Deadly(), batch_size=2, num_workers=2))

    accelerator, loader = prepared()
    for step, _ in enumerate(loader):
        if step == 0:
            accelerator.save_state(tmp_path / "state")
    accelerator, loader = prepared()
    accelerator.load_state(tmp_path / "state")
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        read(accelerator.skip_first_batches(loader, 1))


def start_late(late: int, worker: int) -> None:
    """One worker's first batch comes after those of the others."""
    if worker == late:
        time.sleep(1)


@pytest.mark.takes_turns
def test_no_batch_is_taken_for_an_empty_one(tmp_path: Path) -> None:
    def prepared(late: int) -> tuple[Accelerator, Any]:
        options: Any = {"num_workers": 2, "in_order": False, "worker_init_fn": partial(start_late, late)}
        accelerator = Accelerator(cpu=True)
        return accelerator, accelerator.prepare(DataLoader(Noisy(), batch_size=2, **options))

    accelerator, loader = prepared(1)
    for step, _ in enumerate(loader):
        if step == 0:
            accelerator.save_state(tmp_path / "state")
    accelerator, loader = prepared(0)
    accelerator.load_state(tmp_path / "state")
    rest = read(accelerator.skip_first_batches(loader, 1))
    assert sorted(row[0] for batch in rest for row in batch) == list(range(2, NUM_SAMPLES))


@pytest.mark.takes_turns
def test_the_loader_keeps_what_it_was_given() -> None:
    loader = Accelerator(cpu=True).prepare(CASES["seeded by the program"]())
    generator = loader.generator
    for _ in loader:
        assert loader.collate_fn is pair
        assert loader.worker_init_fn is seeded_by_number
        assert loader.generator is generator


class Broken(Noisy):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise KeyError(f"no sample {index}")
        return super().__getitem__(index)


def test_an_error_of_a_dataset_is_raised_as_it_is() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(Broken(), batch_size=2, num_workers=2))
    with pytest.raises(KeyError, match="no sample 5"):
        read(loader)


@pytest.mark.takes_turns
@pytest.mark.sample(1)
def test_workers_that_are_spawned(tmp_path: Path) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2, multiprocessing_context="spawn")

    set_seed(1)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(make())
    rest = []
    for step, batch in enumerate(loader):
        if step > 2:
            rest.append(batch.tolist())
        if step == 2:
            accelerator.save_state(tmp_path / "state")
    set_seed(2)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(make())
    accelerator.load_state(tmp_path / "state")
    assert read(accelerator.skip_first_batches(loader, 3)) == rest


class Slow(Noisy):
    """Whose first sample of all takes long."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            time.sleep(0.5)
        return super().__getitem__(index)


@pytest.mark.takes_turns
@pytest.mark.parametrize(("seconds", "is_told"), [(0.05, True), (60.0, False)])
def test_workers_that_deliver_no_first_batch_are_named_and_print_their_stacks(
    seconds: float,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("accel_data.workers.SILENT_SECONDS", seconds)
    monkeypatch.setattr("accel_data.workers.STACK_DELAY_SECONDS", seconds)
    loader = Accelerator(cpu=True).prepare(DataLoader(Slow(), batch_size=2, num_workers=2))
    assert len(read(loader)) == NUM_SAMPLES // 2
    told = [record.getMessage() for record in caplog.records if "have delivered no batch" in record.getMessage()]
    assert len(told) == is_told
    assert all("pid " in message and "forkserver" in message for message in told)
    assert (f'{Path(__file__).name}", line' in capfd.readouterr().err) == is_told


def test_workers_begin_where_the_program_has_a_watchdog() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(Noisy(), batch_size=2, num_workers=1))
    faulthandler.dump_traceback_later(3600)
    try:
        assert len(read(loader)) == NUM_SAMPLES // 2
    finally:
        faulthandler.cancel_dump_traceback_later()


def test_workers_are_told_of_before_the_launcher_ends_a_run_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert workers.seconds_of_patience() == 60
    monkeypatch.setenv("ACCELERATE_HANG_TIMEOUT", "20")
    assert workers.seconds_of_patience() == 10
    monkeypatch.setenv("ACCELERATE_HANG_TIMEOUT", "3600")
    assert workers.seconds_of_patience() == 60


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.takes_turns
def test_a_thread_that_computes_is_seen_before_a_fork() -> None:
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)  # without the GIL

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        assert any(workers.another_thread_runs() for _ in range(100_000))
        workers.wait_for_idle_threads(seconds=0)  # and no longer
    finally:
        stop.set()
        thread.join()
    assert not all(workers.another_thread_runs() for _ in range(100_000))
