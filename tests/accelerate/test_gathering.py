"""`gather_for_metrics`: exactly the data set, whatever the number of processes, the loader and the structure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator, DataLoaderConfiguration
from tests.support.ranks import ranks


class Stream(IterableDataset[torch.Tensor]):
    """A data set that does not say how long it is."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.length))


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def collect(accelerator: Accelerator, loader: Any) -> list[int]:
    found: list[int] = []
    for batch in accelerator.prepare(loader):
        found += accelerator.gather_for_metrics(batch).tolist()
    return found


@ranks(1, 2, 3)
def test_every_sample_comes_once_and_in_order(rank: int, world: int) -> None:
    for length, batch_size, drop_last, split in itertools.product(
        (1, 2, 3, 5, 8, 13), (1, 2, 4), (False, True), (False, True)
    ):
        if split and batch_size % world:
            continue
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split))
        kept = length - length % (batch_size * (1 if split else world)) if drop_last else length
        loader = DataLoader(torch.arange(length), batch_size=batch_size, drop_last=drop_last)
        assert collect(accelerator, loader)[:kept] == list(range(kept)), (length, batch_size, drop_last, split)


@ranks(1, 2)
def test_streams_and_dispatched_loaders(rank: int, world: int) -> None:
    for length, dispatch in itertools.product((3, 4, 7, 9), (None, True, False)):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
        expected = list(range(length))
        found = collect(accelerator, DataLoader(Stream(length), batch_size=2))
        assert found[:length] == expected, (length, dispatch)
        if dispatch is not False:
            assert len(found) == length
            assert collect(accelerator, DataLoader(torch.arange(length), batch_size=2)) == expected


@ranks(2)
def test_structures_keep_their_types(rank: int, world: int) -> None:
    accelerator = Accelerator()
    gathered = []
    for batch in accelerator.prepare(DataLoader(torch.arange(5), batch_size=2)):
        got = accelerator.gather_for_metrics({"pair": Pair(batch, -batch), "list": [batch.view(-1, 1)]})
        assert isinstance(got["pair"], Pair)
        gathered.append(got)
    last = gathered[-1]
    assert last["pair"].first.tolist() == [4]
    assert last["pair"].second.tolist() == [-4]
    assert last["list"][0].tolist() == [[4]]


@ranks(2)
def test_objects_are_gathered_and_cut_too(rank: int, world: int) -> None:
    accelerator = Accelerator()
    words: list[str] = []
    tensors: list[torch.Tensor] = []
    for batch in accelerator.prepare(DataLoader(torch.arange(5), batch_size=2)):
        words += accelerator.gather_for_metrics([f"word {index}" for index in batch.tolist()])
        tensors += accelerator.gather_for_metrics(list(batch), use_gather_object=True)
    assert words == [f"word {index}" for index in range(5)]
    assert [int(tensor) for tensor in tensors] == list(range(5))


@ranks(2)
@pytest.mark.parametrize("dispatch", [False, True])
def test_the_last_batch_is_known_when_its_iterator_is_gone(rank: int, dispatch: bool) -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    nine, nineteen = accelerator.prepare(
        DataLoader(torch.arange(9), batch_size=5), DataLoader(torch.arange(19), batch_size=5)
    )

    def gathered(data: Any) -> int:
        return len(accelerator.gather_for_metrics(data))

    batch = next(iter(nine))
    assert gathered(batch) == 9
    assert len(accelerator.gather_for_metrics({"x": batch[:, None]})["x"]) == 9
    assert gathered([str(number) for number in batch.tolist()]) == 9
    assert gathered(torch.arange(20)) == 40, "what is not of that batch is left whole"
    assert gathered(torch.arange(3)) == 6
    state = accelerator.gradient_state
    assert (state.in_dataloader, state.end_of_dataloader) == (False, False), "nothing is being iterated"

    assert gathered(next(iter(nineteen))) == 10, "the first of two"
    for number, batch in enumerate(nineteen):
        if number == 1:
            last = batch
            break
    assert gathered(last) == 9
    assert gathered(list(itertools.islice(nineteen, 2))[-1]) == 9
    assert gathered([batch for _, batch in zip(range(2), nineteen, strict=False)][-1]) == 9
    iterator = iter(nine)
    assert gathered(next(iterator)) == 9
    del iterator

    batch = next(iter(nine))
    found = [gathered(outer) for outer in nineteen]
    assert found == [10, 9]
    assert gathered(batch) == 10, "another iteration has begun since"
    for outer in nineteen:
        next(iter(nine))
        assert gathered(outer) == (9 if nineteen.end_of_dataloader else 10), "the loop's own batches count"


@ranks(2)
def test_outside_of_a_loader_nothing_is_dropped(rank: int, world: int) -> None:
    accelerator = Accelerator()
    assert accelerator.gather_for_metrics(torch.tensor([rank])).tolist() == [0, 1]
    assert accelerator.gather_for_metrics(["a"]) == ["a", "a"]


@pytest.mark.parametrize("data", [["a", "b"], "text", {"a": 3}, [3, 4]])
def test_objects_of_one_process_come_back(data: Any) -> None:
    assert Accelerator(cpu=True).gather_for_metrics(data) == data


@ranks(2)
def test_the_plain_collectives(rank: int, world: int) -> None:
    accelerator = Accelerator()
    mine = torch.full((rank + 1,), float(rank))
    assert accelerator.gather({"x": mine})["x"].tolist() == [0.0, 1.0, 1.0]
    assert accelerator.pad_across_processes(mine, pad_index=9).tolist() == ([0.0, 9.0] if rank == 0 else [1.0, 1.0])
    assert accelerator.pad_across_processes(mine, pad_index=9, pad_first=True).tolist()[-1] == float(rank)
    assert accelerator.reduce(torch.tensor(rank + 1.0)).item() == 3.0
    assert accelerator.reduce([torch.tensor(rank + 1.0)], reduction="mean")[0].item() == 1.5


@ranks(2)
def test_parts_of_a_stream_may_differ_in_length(rank: int, world: int) -> None:
    class Halves(IterableDataset[int]):
        def split_for_process(self, index: int, count: int) -> Any:
            return range(10) if index == 0 else range(10, 14)

        def __iter__(self) -> Iterator[int]:
            raise AssertionError("each process reads its own part only")

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Halves(), batch_size=3))
    found = [value for batch in loader for value in accelerator.gather_for_metrics(batch).tolist()]
    assert sorted(found) == list(range(14))


def test_loaders_of_unknown_length_may_be_nested() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    accelerator = Accelerator()
    outer, inner = accelerator.prepare(DataLoader(Stream()), DataLoader(Stream()))
    assert sum(1 for _ in outer for _ in inner) == 16
