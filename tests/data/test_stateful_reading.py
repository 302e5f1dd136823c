"""torchdata's loaders of datasets that draw random numbers: the rest of an epoch that was stopped is the same."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed

pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = [
    pytest.mark.skipif("coverage" in sys.modules, reason="forked workers now and then die under coverage"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata's own call
]
NUM_SAMPLES = 22


class Noisy(Dataset[torch.Tensor]):
    """Each sample with noise of two generators."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item(), random.random()], dtype=torch.float64)


class NoisyStream(IterableDataset[torch.Tensor]):
    """The same without indices; workers share it."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, NUM_SAMPLES, step):
            yield Noisy()[index]


class StreamWithState(NoisyStream):
    """One that is set to where it was, instead of being read again."""

    position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for position, index in enumerate(range(first, NUM_SAMPLES, step)):
            if position >= self.position:
                self.position = position + 1
                yield Noisy()[index]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class OwnIterator(IterableDataset[torch.Tensor]):
    """A stream that is its own iterator, and has a state."""

    position = 0

    def __iter__(self) -> OwnIterator:
        self.position = 0 if self.position >= NUM_SAMPLES else self.position
        return self

    def __next__(self) -> torch.Tensor:
        if self.position >= NUM_SAMPLES:
            raise StopIteration
        self.position += 1
        return Noisy()[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {"num_workers": 0},
    "workers": {"num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}
DATASETS: dict[str, Any] = {
    "indexed": Noisy,
    "stream": NoisyStream,
    "stream with a state": StreamWithState,
    "iterator": OwnIterator,
}
MOMENTS: dict[str, tuple[int, int | None]] = {
    "first batch": (0, 1),
    "within": (0, 5),
    "second epoch": (1, 4),
    "end": (0, None),
}


def prepared(data: str, workers: str, seed: int) -> tuple[Accelerator, Any]:
    set_seed(seed)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    dataset: Any = DATASETS[data]()
    plain: DataLoader[Any] = DataLoader(dataset, batch_size=2, shuffle=data == "indexed", **WORKERS[workers])
    return accelerator, accelerator.prepare(plain)


def read_on(loader: Any, first: int) -> list[Any]:
    return [[batch.tolist() for batch in loader] for _ in range(first, 3)]


def end_workers(loader: Any) -> None:
    """End persistent workers; workers forked later would otherwise try to."""
    iterator = loader.base_dataloader._iterator
    if loader.num_workers:
        iterator._shutdown_workers()


def until(loader: Any, moment: str, save: Any) -> list[Any]:
    """The rest of a run after `save` was called."""
    epoch, batches = MOMENTS[moment]
    for _ in range(epoch):
        list(loader)
    rest, is_saved = [], False
    for step, batch in enumerate(loader):
        if is_saved:
            rest.append(batch.tolist())
        if step + 1 == batches or (batches is None and loader.end_of_dataloader):
            save()
            is_saved = True
    return [*([rest] if rest else []), *read_on(loader, epoch + 1)]


@pytest.mark.takes_turns
@pytest.mark.sample(8)
@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("data", DATASETS)
def test_the_rest_of_an_epoch_and_the_next_ones_are_the_same(
    data: str, workers: str, moment: str, tmp_path: Path
) -> None:
    accelerator, loader = prepared(data, workers, seed=1)
    expected = until(loader, moment, lambda: accelerator.save_state(tmp_path / "state"))
    end_workers(loader)
    accelerator, loader = prepared(data, workers, seed=2)
    accelerator.load_state(tmp_path / "state")
    actual = read_on(loader, 3 - len(expected))
    end_workers(loader)
    assert actual == expected


@pytest.mark.takes_turns
@pytest.mark.parametrize("workers", WORKERS)
def test_a_position_alone_has_the_order_and_the_random_numbers_of_its_epoch(workers: str) -> None:
    _, loader = prepared("indexed", workers, seed=1)
    states: list[Any] = []
    expected = until(loader, "second epoch", lambda: states.append(loader.state_dict()))
    end_workers(loader)
    _, loader = prepared("indexed", workers, seed=2)
    loader.load_state_dict(states[0])
    rest = [batch.tolist() for batch in loader]
    end_workers(loader)
    read = rest if workers != "no workers" else rest[:1]  # the process's own random numbers are not the loader's
    assert read == expected[0][: len(read)]
    assert [[sample[0] for sample in batch] for batch in rest] == [[s[0] for s in batch] for batch in expected[0]]
