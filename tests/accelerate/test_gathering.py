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
    actual: list[int] = []
    for batch in accelerator.prepare(loader):
        actual += accelerator.gather_for_metrics(batch).tolist()
    return actual


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
        actual = collect(accelerator, DataLoader(Stream(length), batch_size=2))
        assert actual[:length] == expected, (length, dispatch)
        if dispatch is not False:
            assert len(actual) == length
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
    actual = [gathered(outer) for outer in nineteen]
    assert actual == [10, 9]
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
    actual = [value for batch in loader for value in accelerator.gather_for_metrics(batch).tolist()]
    assert sorted(actual) == list(range(14))


def test_loaders_of_unknown_length_may_be_nested() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    accelerator = Accelerator()
    outer, inner = accelerator.prepare(DataLoader(Stream()), DataLoader(Stream()))
    assert sum(1 for _ in outer for _ in inner) == 16


# ---- what is no tensor ----------------------------------------------------------------------------------------------


STRUCTURES: dict[str, Any] = {
    "list": lambda ids: [f"s{i}" for i in ids],
    "tuple of strings": lambda ids: tuple(f"s{i}" for i in ids),
    "tuple of lists": lambda ids: ([f"s{i}" for i in ids], [-i for i in ids]),
    "tensor beside strings": lambda ids: (torch.tensor(ids), [f"s{i}" for i in ids]),
    "list of a tensor and strings": lambda ids: [torch.tensor(ids), tuple(f"s{i}" for i in ids)],
    "dict of lists": lambda ids: {"text": [f"s{i}" for i in ids], "length": list(ids)},
    "nested": lambda ids: {"a": {"b": ([f"s{i}" for i in ids], torch.tensor(ids))}, "c": [{"id": i} for i in ids]},
    "lists of tokens": lambda ids: [[i] * (i + 1) for i in ids],
    "named tuple": lambda ids: Pair(torch.tensor(ids), [f"s{i}" for i in ids]),  # type: ignore[arg-type]
    "nothing but None": lambda ids: [None for _ in ids],
}


def plain(data: Any) -> Any:
    """The same structure, comparable by ==; samples in lists."""
    if isinstance(data, torch.Tensor):
        return data.tolist()
    if isinstance(data, dict):
        return {key: plain(value) for key, value in data.items()}
    return [plain(item) for item in data] if isinstance(data, (list, tuple)) else data


@ranks(1, 2, 3)
def test_predictions_of_any_structure_come_once_and_in_order(rank: int, world: int) -> None:
    for length, (name, make) in itertools.product((4, 7, 9), STRUCTURES.items()):
        accelerator = Accelerator()
        rows: list[Any] = []
        for batch in accelerator.prepare(DataLoader(torch.arange(length), batch_size=2)):
            actual = accelerator.gather_for_metrics(make(batch.tolist()))
            assert isinstance(actual, (list, type(make([0]))))
            rows.append(plain(actual))
        ids = list(range(length))
        rounds = [ids[start : start + 2 * world] for start in range(0, length, 2 * world)]
        assert rows == [plain(make(some)) for some in rounds], (name, length)


@ranks(2)
def test_leaves_of_the_whole_batch_are_listed_by_rank(rank: int, world: int) -> None:
    accelerator = Accelerator()
    actual = accelerator.gather_for_metrics({"loss": 0.5 + rank, "name": f"rank{rank}", "text": ["a", "b", "c"]})
    assert actual == {"loss": [0.5, 1.5], "name": ["rank0", "rank1"], "text": ["a", "b", "c"] * 2}


@ranks(2)
def test_tensors_of_different_widths_become_rows(rank: int, world: int) -> None:
    accelerator = Accelerator()
    tokens, texts = accelerator.gather_for_metrics((torch.ones(2, 3 + rank), ["a", "b"]))
    assert [row.shape[0] for row in tokens] == [3, 3, 4, 4]
    assert texts == ["a", "b", "a", "b"]
    by_name = accelerator.gather_for_metrics({"x": torch.ones(2, 3 + rank)}, use_gather_object=True)
    assert [row.shape[0] for row in by_name["x"]] == [3, 3, 4, 4]


@ranks(2)
def test_different_structures_are_an_error_on_all_ranks(rank: int, world: int) -> None:
    accelerator = Accelerator()
    with pytest.raises(ValueError, match=r"\['a'\] on rank 0, \['b'\] on rank 1"):
        accelerator.gather_for_metrics({"ab"[rank]: ["text"]})
