"""Runs that are stopped and resumed, beside ones that never stop: for which loaders are they the same, bit for bit?

    uv run --no-sync python -m tests.support.resumed_runs [part of a cell's name, or -part ...] [world=2]

prints every cell of the matrix that is not. A cell is a kind of data, a number of workers, a way of reading batches, a
moment at which the run is saved, and how it finds its place again.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler

from accel_data import adapter
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed

NUM_SAMPLES = 21  # the last round of two processes is not full
NUM_EPOCHS = 3
STEPS_BEFORE_SAVING = 3  # of an epoch
KINDS = (
    "sequential",
    "shuffled",
    "weighted",
    "custom",
    "drawing",
    "batches",
    "stream",
    "stream_with_state",
    "augmented",
)
SHARINGS = ("shard", "dispatch", "split")
MOMENTS = ("mid", "boundary", "last_batch", "second", "accumulating")
"""The last one is inside an accumulation window."""
WAYS = ("seedable", "default", "stateful", "switch", "by_hand", "dropping")
"""How a run finds its place. The first two skip batches after `load_state`; the next two have `use_stateful_dataloader=True`,
with torchdata and without it. The last two read the epoch from its start, and their samples alone are compared: one passes
over the batches that were seen, and the other also drops every third batch without a forward pass."""
SWITCHED = ("stateful", "switch")
COUNTED = ("by_hand", "dropping")


@dataclass(frozen=True)
class Cell:
    """One case; see the module."""

    kind: str = "shuffled"
    workers: int = 0
    sharing: str = "shard"
    moment: str = "mid"
    way: str = "default"
    persistent: bool = False

    def __str__(self) -> str:
        workers = f"workers={self.workers}" + ",persistent" * self.persistent
        return f"{self.way} {self.kind} {self.sharing} {self.moment} {workers}"


class Numbers(Dataset[torch.Tensor]):
    """Samples that say which they are."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 1.0])


class Augmented(Numbers):
    """Samples with noise, drawn while they are read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(()).item() + random.random() + np.random.rand()
        return torch.tensor([float(index), noise])


class Stream(IterableDataset[torch.Tensor]):
    """The same without indices; workers share it."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (torch.tensor([float(index), 1.0]) for index in range(first, NUM_SAMPLES, step))


class StreamWithState(Stream):
    """One that torchdata can set to where it was."""

    position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for position, sample in enumerate(super().__iter__()):
            if position >= self.position:
                self.position = position + 1
                yield sample
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Custom(Sampler[int]):
    """Shuffles by epoch."""

    epoch = 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(NUM_SAMPLES, generator=generator).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Drawing(Sampler[int]):
    """Shuffles by torch's own generator."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(NUM_SAMPLES).tolist())


def make_loader(cell: Cell, per_process: int, world: int) -> DataLoader[Any]:
    """The loader as a program builds it."""
    size = per_process * (world if cell.sharing == "split" else 1)
    options: dict[str, Any] = {"num_workers": cell.workers, "persistent_workers": cell.persistent}
    if cell.kind == "batches":
        sampler: Any = BatchSampler(Drawing(), size, drop_last=False)
        return DataLoader(Numbers(), batch_sampler=sampler, **options)
    options["batch_size"] = size
    if cell.kind == "stream":
        return DataLoader(Stream(), **options)
    if cell.kind == "stream_with_state":
        return DataLoader(StreamWithState(), **options)
    if cell.kind in ("shuffled", "augmented"):
        return DataLoader(Augmented() if cell.kind == "augmented" else Numbers(), shuffle=True, **options)
    if cell.kind == "weighted":
        options["sampler"] = WeightedRandomSampler([1.0 + index % 3 for index in range(NUM_SAMPLES)], NUM_SAMPLES)
    if cell.kind in ("custom", "drawing"):
        options["sampler"] = Custom() if cell.kind == "custom" else Drawing()
    return DataLoader(Numbers(), **options)


class Run:
    """A small training run with dropout.

    Args:
        cell: What is tried.
        folder: Of the checkpoint.
        seed: Of everything random; the resumed run begins with another one.
        batch_size: Of each process.
    """

    def __init__(self, cell: Cell, folder: Path, seed: int, batch_size: int = 2) -> None:
        self.cell, self.folder = cell, folder
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2 if cell.moment == "accumulating" else 1,
            dataloader_config=DataLoaderConfiguration(
                split_batches=cell.sharing == "split",
                dispatch_batches=cell.sharing == "dispatch",
                use_seedable_sampler=cell.way == "seedable",
                use_stateful_dataloader=cell.way in SWITCHED,
            ),
        )
        set_seed(seed)
        model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = make_loader(cell, batch_size, self.accelerator.num_processes)
        with mock.patch.object(
            adapter, "is_torchdata_stateful_dataloader_available", return_value=cell.way != "switch"
        ):
            self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        if cell.kind not in ("drawing", "batches"):  # samplers that need the same random numbers everywhere
            torch.manual_seed(seed + self.accelerator.process_index)
        self.seen: list[tuple[int, list[int]]] = []

    @property
    def saved_epoch(self) -> int:
        return 1 if self.cell.moment == "second" else 0

    def train(self) -> None:
        """The run that never stops; saves on the way."""
        for epoch in range(NUM_EPOCHS):
            self._set_epoch(epoch)
            for step, batch in enumerate(self.loader):
                self._step(epoch, batch)
                if self._saves_after(epoch, step):
                    self._save()
            if self.cell.moment == "boundary" and epoch == self.saved_epoch:
                self._save()

    def resume(self) -> None:
        """The run that is resumed from the checkpoint."""
        self.accelerator.load_state(self.folder / "state")
        first = self.saved_epoch + (self.cell.moment in ("boundary", "last_batch"))
        for epoch in range(first, NUM_EPOCHS):
            self._set_epoch(epoch)
            loader = self.loader
            is_interrupted = epoch == self.saved_epoch
            if is_interrupted and self.cell.way not in SWITCHED + COUNTED:
                loader = self.accelerator.skip_first_batches(loader, STEPS_BEFORE_SAVING)
            for step, batch in enumerate(loader):
                if is_interrupted and self.cell.way in COUNTED and step < STEPS_BEFORE_SAVING:
                    continue
                self._step(epoch, batch)

    def end(self) -> None:
        """End persistent workers; workers forked later would otherwise try to."""
        iterator = getattr(self.loader.base_dataloader, "_iterator", None)
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()

    def _set_epoch(self, epoch: int) -> None:
        if self.cell.way == "seedable":  # the documented way; the others do without
            self.loader.set_epoch(epoch)

    def _saves_after(self, epoch: int, step: int) -> bool:
        if epoch != self.saved_epoch or self.cell.moment == "boundary":
            return False
        last = self.cell.moment == "last_batch"
        return self.accelerator.gradient_state.end_of_dataloader if last else step + 1 == STEPS_BEFORE_SAVING

    def _save(self) -> None:
        self.accelerator.save_state(self.folder / "state")
        self.seen.clear()  # from here on the runs are compared

    def _step(self, epoch: int, batch: torch.Tensor) -> None:
        self.seen.append((epoch, batch[:, 0].int().tolist()))
        if self.cell.way == "dropping" and len(self.seen) % 3 == 0:
            return
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()


def differences(cell: Cell, folder: Path) -> str:
    """What differs between the two runs of a cell on this process; nothing where they are the same, bit for bit."""
    whole = Run(cell, folder, seed=1)
    whole.train()
    whole.end()
    random_numbers = torch.get_rng_state()
    resumed = Run(cell, folder, seed=2)
    resumed.resume()
    resumed.end()
    actual = []
    seen, again = whole.seen, resumed.seen
    if (
        cell.way in COUNTED and cell.kind == "augmented"
    ):  # reading again what was seen draws numbers, also of later orders
        seen, again = ([batch for batch in run.seen if batch[0] == run.saved_epoch] for run in (whole, resumed))
    if [sample for _, sample in seen] != [sample for _, sample in again]:
        actual.append(f"samples {seen} != {again}")
    if cell.way in COUNTED:
        return ", ".join(actual)
    if not torch.equal(random_numbers, torch.get_rng_state()):
        actual.append("random numbers")
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    if not all(torch.equal(first, second) for first, second in pairs):
        actual.append("weights")
    return ", ".join(actual)


def all_cells() -> list[Cell]:
    """The whole matrix."""
    workers = ((0, False), (2, False), (2, True))
    return [
        Cell(kind, count, sharing, moment, way, persistent)
        for kind, (count, persistent), sharing, moment, way in itertools.product(
            KINDS, workers, SHARINGS, MOMENTS, WAYS
        )
    ]


def look_at(cells: list[dict[str, Any]], folder: str, rank: int) -> None:
    """Write down what differs in each cell; runs on every rank."""
    for number, fields in enumerate(cells):
        cell = Cell(**fields)
        try:
            actual = differences(cell, Path(folder) / str(number))
        except Exception as error:
            actual = f"{type(error).__name__}: {error}"
        (Path(folder) / f"{number}_{rank}").write_text(actual)


look_at.body = look_at  # type: ignore[attr-defined]  # what the processes of `tests.support.ranks` call


def found_in(folder: Path, cells: list[Cell], world: int) -> dict[str, list[str]]:
    """What `look_at` wrote down: cells that differ to what does, on each rank."""
    actual = {
        str(cell): [(folder / f"{number}_{rank}").read_text() for rank in range(world)]
        for number, cell in enumerate(cells)
    }
    return {cell: texts for cell, texts in actual.items() if any(texts)}


def run_rank(folder: Path) -> None:
    """One rank of `main`: a process of its own, which may have workers."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        store = torch.distributed.FileStore(str(folder / "store"), world)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    look_at(json.loads((folder / "cells.json").read_text()), str(folder), rank)


def main(wanted: list[str]) -> None:
    """Print the cells that differ, and how many are the same."""
    worlds = [int(word.partition("=")[2]) for word in wanted if word.startswith("world=")]
    wanted = [word for word in wanted if not word.startswith("world=")]
    without = [word[1:] for word in wanted if word.startswith("-")]
    names = [word for word in wanted if not word.startswith("-")]
    cells = [cell for cell in all_cells() if all(word in str(cell) for word in names)]
    cells = [cell for cell in cells if not any(word in str(cell) for word in without)]
    for world in worlds or (1, 2):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "cells.json").write_text(json.dumps([asdict(cell) for cell in cells]))
            command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--rank", name]
            ranks = [subprocess.Popen(command, env=_environment(rank, world)) for rank in range(world)]
            for process in ranks:
                process.wait()
            actual = found_in(folder, cells, world)
        for cell, texts in actual.items():
            sys.stdout.write(f"world={world} {cell}: {' | '.join(texts)}\n")
        sys.stdout.write(f"world={world}: {len(cells) - len(actual)} of {len(cells)} cells are the same\n")
        sys.stdout.flush()


def _environment(rank: int, world: int) -> dict[str, str]:
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"} if world > 1 else {}
    return os.environ | own | address | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(Path(sys.argv[2]))
    else:
        main(sys.argv[1:])
