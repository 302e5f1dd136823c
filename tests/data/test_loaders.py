"""Prepared data loaders in one process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from accel_data.dispatcher import DataLoaderDispatcher
from accel_data.loader_shard import DataLoaderShard
from accel_data.prepare import prepare_data_loader
from accel_data.samplers import SeedableRandomSampler
from accel_data.skipping import SkipDataLoader, skip_first_batches
from accel_state.gradient_state import GradientState
from tests.data.test_shards import Stream


class Counted(torch.utils.data.Dataset[int]):
    """Remembers what was read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def values(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_a_loader_is_a_torch_loader_with_its_attributes() -> None:
    loader = prepare_data_loader(DataLoader(range(10), batch_size=4, num_workers=0))  # type: ignore[arg-type]
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, DataLoaderShard)
    assert (loader.num_workers, len(loader), loader.total_batch_size, loader.total_dataset_length) == (0, 3, 4, 10)
    assert values(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    again = pickle.loads(pickle.dumps(loader))
    assert type(again) is DataLoaderShard
    assert values(again) == values(loader)


def test_the_gradient_state_knows_the_last_batch() -> None:
    state = GradientState()
    loader = prepare_data_loader(DataLoader(range(10), batch_size=4))  # type: ignore[arg-type]
    seen = []
    for _ in loader:
        assert state.in_dataloader
        seen.append((state.end_of_dataloader, state.remainder))
        for _ in prepare_data_loader(DataLoader(range(2))):  # type: ignore[arg-type]
            assert state.active_dataloader is not loader
        assert state.active_dataloader is loader
    assert seen == [(False, 2), (False, 2), (True, 2)]
    assert not state.in_dataloader


def test_leaving_early_ends_the_iteration() -> None:
    state = GradientState()
    loader = prepare_data_loader(DataLoader(range(10)))  # type: ignore[arg-type]
    for _ in loader:
        break
    assert not state.in_dataloader


def test_tiny_data_sets() -> None:
    assert values(prepare_data_loader(DataLoader(range(1), batch_size=4))) == [[0]]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="length 0"):
        prepare_data_loader(DataLoader(range(0), batch_size=4))  # type: ignore[arg-type]


def test_skipping_reads_only_the_rest() -> None:
    data = Counted(10)
    loader = skip_first_batches(prepare_data_loader(DataLoader(data, batch_size=2)), 3)
    assert len(loader) == 2
    assert values(loader) == [[6, 7], [8, 9]]
    assert data.read == [6, 7, 8, 9]
    plain = skip_first_batches(DataLoader(range(10), batch_size=2), 3)  # type: ignore[arg-type]
    assert type(plain) is DataLoader
    assert values(plain) == [[6, 7], [8, 9]]
    stream = skip_first_batches(DataLoader(Stream(7), batch_size=2), 2)
    assert isinstance(stream, SkipDataLoader)
    assert values(stream) == [[4, 5], [6]]
    with pytest.raises(ValueError, match="num_batches=-1"):
        skip_first_batches(plain, -1)


def test_skipping_keeps_order_and_epoch() -> None:
    loader = prepare_data_loader(
        DataLoader(range(12), batch_size=2, shuffle=True),
        use_seedable_sampler=True,
        data_seed=1,  # type: ignore[arg-type]
    )
    assert isinstance(loader.get_sampler(), SeedableRandomSampler)  # type: ignore[attr-defined]
    first = values(loader)
    loader.set_epoch(0)  # type: ignore[attr-defined]
    assert values(skip_first_batches(loader, 2)) == first[2:]
    loader.set_epoch(1)  # type: ignore[attr-defined]
    assert values(loader) != first


def test_samplers_that_yield_batches() -> None:
    batches = BatchSampler(SequentialSampler(range(6)), batch_size=3, drop_last=False)
    data = torch.arange(6)
    for arguments in ({"sampler": batches, "batch_size": None}, {"batch_sampler": batches}):
        loader = prepare_data_loader(DataLoader(data, **arguments))  # type: ignore[arg-type]
        assert values(loader) == [[0, 1, 2], [3, 4, 5]]


def test_a_dispatcher_works_alone_and_with_any_data() -> None:
    class Words(IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield from ({"text": text, "number": len(text)} for text in ("a", "bb", "ccc"))

    loader = prepare_data_loader(DataLoader(Words(), batch_size=2), put_on_device=True)
    assert isinstance(loader, DataLoaderDispatcher)
    assert [batch["text"] for batch in loader] == [["a", "bb"], ["ccc"]]
    assert [batch["number"].tolist() for batch in loader] == [[1, 2], [3]]


def test_settings_that_exclude_one_another() -> None:
    with pytest.raises(ValueError, match="dispatch_batches=True"):
        prepare_data_loader(DataLoader(Stream(3)), dispatch_batches=True, put_on_device=False)
    with pytest.raises(ValueError, match="batches of 3 evenly between 2"):
        prepare_data_loader(DataLoader(range(8), batch_size=3), num_processes=2, process_index=0, split_batches=True)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher, SkipDataLoader])
def test_stateful_loaders_go_on_where_they_stopped(kind: type) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    loader: Any = kind(range(12), batch_size=2, use_stateful_dataloader=True)
    assert isinstance(loader, stateful)
    assert isinstance(loader, kind)
    expected = values(loader)
    state = None
    for index, _ in enumerate(loader):
        if index == 2:
            state = loader.state_dict()
            break
    again: Any = kind(range(12), batch_size=2, use_stateful_dataloader=True)
    again.load_state_dict(state)
    assert values(again) == expected[3:]
    assert type(pickle.loads(pickle.dumps(kind(range(2))))) is kind
