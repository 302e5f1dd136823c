"""Data loaders of a program's own class: what it yields, its methods, and this process's shard."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_data.prepare import prepare_data_loader
from accel_data.skipping import skip_first_batches
from accelerate import Accelerator, DataLoaderConfiguration

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own call


class Doubling(DataLoader[Any]):
    """Changes batches while it is iterated, and has a method and an attribute."""

    def __init__(self, *args: Any, vocabulary: int = 7, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vocabulary = vocabulary

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return (2 * batch for batch in super().__iter__())

    def size_of_a_batch(self) -> int | None:
        return self.batch_size


class Filtering(DataLoader[Any]):
    """As graph libraries do: wraps torch's iterator."""

    def _get_iterator(self) -> Any:
        return (batch + 100 for batch in super()._get_iterator())


class Repeating(DataLoader[Any]):
    """Yields each batch twice."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return (batch for batch in super().__iter__() for _ in range(2))

    def __len__(self) -> int:
        return 2 * super().__len__()


class Kept(DataLoader[Any]):
    """Yields what one iterator of all samples, started when it was made, has left."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept = super().__iter__()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.kept)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def lists(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_its_iteration_and_methods_stay() -> None:
    loader: Any = prepare_data_loader(Doubling(torch.arange(6), batch_size=2))
    ends = []
    assert [(ends.append(loader.end_of_dataloader), batch.tolist())[1] for batch in loader] == [
        [0, 2],
        [4, 6],
        [8, 10],
    ]
    assert ends == [False, False, True]
    assert (loader.vocabulary, loader.size_of_a_batch(), len(loader)) == (7, 2, 3)
    assert lists(pickle.loads(pickle.dumps(loader))) == [[0, 2], [4, 6], [8, 10]]
    assert lists(prepare_data_loader(Filtering(torch.arange(4), batch_size=2))) == [[100, 101], [102, 103]]
    repeating = prepare_data_loader(Repeating(torch.arange(4), batch_size=2))
    assert (len(repeating), lists(repeating)) == (4, [[0, 1], [0, 1], [2, 3], [2, 3]])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Doubling, Filtering])
def test_each_process_reads_its_shard(kind: type[DataLoader[Any]], workers: int) -> None:
    plain = kind(torch.arange(8), batch_size=2, num_workers=workers)
    shards = [lists(prepare_data_loader(plain, num_processes=2, process_index=index)) for index in range(2)]
    whole = lists(plain)
    assert shards == [whole[::2], whole[1::2]]
    shards = [
        lists(prepare_data_loader(kind(Numbers(), batch_size=2), num_processes=2, process_index=index))
        for index in range(2)
    ]
    assert shards == [whole[::2], whole[1::2]]


def test_one_that_reads_no_shard_is_refused() -> None:
    assert lists(prepare_data_loader(Kept(torch.arange(4), batch_size=2))) == [[0, 1], [2, 3]]
    loader = prepare_data_loader(Kept(torch.arange(8), batch_size=2), num_processes=2, process_index=1)
    with pytest.raises(
        ValueError, match=r"Kept yields batches without reading its batch_sampler.*each of 2 processes"
    ):
        lists(loader)
    loader = prepare_data_loader(Kept(torch.arange(8), batch_size=2), num_processes=2, process_index=1)
    with pytest.raises(ValueError, match="Kept yields batches without reading its batch_sampler"):
        lists(skip_first_batches(loader, 1))


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("kind", [Doubling, Repeating])
def test_its_epochs_continue(kind: type[DataLoader[Any]], continues: bool, tmp_path: Path) -> None:
    def prepared(seed: int) -> tuple[Accelerator, Any]:
        configuration = DataLoaderConfiguration(use_stateful_dataloader=continues)
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        torch.manual_seed(seed)
        return accelerator, accelerator.prepare(kind(torch.arange(12), batch_size=2, shuffle=True))

    accelerator, loader = prepared(1)
    rest = []
    for step, batch in enumerate(loader):
        if step >= 3:
            rest.append(batch.tolist())
        if step == 2:
            accelerator.save_state(tmp_path / "state")
    accelerator, loader = prepared(2)
    accelerator.load_state(tmp_path / "state")
    assert lists(loader if continues else accelerator.skip_first_batches(loader, 3)) == rest
    assert len(lists(loader)) == len(rest) + 3
