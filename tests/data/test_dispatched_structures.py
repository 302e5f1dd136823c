"""Dispatched batches of any structure: each rank gets its samples, whole, in every leaf."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_data.sample_columns import SampleColumns
from accelerate import Accelerator, DataLoaderConfiguration
from tests.support.ranks import ranks

PER_SAMPLE: dict[str, Callable[[list[int]], Any]] = {
    "numbers": lambda ids: torch.tensor(ids) * 10,
    "rows": lambda ids: torch.tensor(ids).view(-1, 1).expand(-1, 3).clone(),
    "strings": lambda ids: [f"s{index}" for index in ids],
    "tuple of strings": lambda ids: tuple(f"s{index}" for index in ids),
    "images": lambda ids: [torch.full((3, 5 + index % 3, 4), index) for index in ids],
    "annotations": lambda ids: [{"id": index, "boxes": torch.full((index % 3, 4), index)} for index in ids],
    "tokens": lambda ids: [[index] * (2 + index % 7) for index in ids],
    "missing": lambda ids: [None if index % 2 else index for index in ids],
}
PER_BATCH: dict[str, Any] = {
    "name": "train", "number": 0.5, "nothing": None, "temperature": torch.tensor(2.0), "classes": ["cat", "dog", "cow", "owl", "bee"],
    "weights": torch.arange(9.0),
}  # fmt: skip


class Pair(NamedTuple):
    ids: torch.Tensor
    rest: Any


def structure(chance: random.Random) -> Callable[[list[int]], Any]:
    """A random collate function, for samples that are their own numbers."""
    samples = chance.sample(sorted(PER_SAMPLE), chance.randint(1, 4))
    whole = chance.sample(sorted(PER_BATCH), chance.randint(0, 3))
    form = chance.choice(["dict", "tuple", "pair", "nested"])

    def collate(ids: list[int]) -> Any:
        leaves = {name: PER_SAMPLE[name](ids) for name in samples} | {name: PER_BATCH[name] for name in whole}
        numbers = torch.tensor(ids)
        if form == "dict":
            return {"ids": numbers, **leaves}
        if form == "pair":
            return Pair(numbers, leaves)
        return {"ids": numbers, "inner": [leaves, "x"]} if form == "nested" else (numbers, *leaves.values())

    return collate


def ids_of(batch: Any) -> list[int]:
    ids: torch.Tensor = batch["ids"] if isinstance(batch, dict) else batch[0]
    return ids.tolist()


def plain(data: Any) -> Any:
    """Comparable by ==."""
    if isinstance(data, torch.Tensor):
        return [str(data.dtype), list(data.shape), data.tolist()]
    if isinstance(data, dict):
        return {key: plain(value) for key, value in data.items()}
    return (type(data).__name__, [plain(item) for item in data]) if isinstance(data, (list, tuple)) else data


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


@ranks(2, 3)
def test_every_leaf_has_the_samples_of_its_rank(rank: int, world: int) -> None:
    for seed in range(60):
        chance = random.Random(seed)
        collate, size, split = structure(chance), chance.choice([3, 4]), chance.random() < 0.3
        length = chance.randint(size * world if split else size, 17)  # the first batch is full
        data: Any = Stream(length) if chance.random() < 0.6 else list(range(length))
        settings = DataLoaderConfiguration(dispatch_batches=True, split_batches=split)
        loader = DataLoader(data, batch_size=size * world if split else size, collate_fn=collate)
        accelerator = Accelerator(dataloader_config=settings)
        seen: list[int] = []
        for batch in accelerator.prepare(loader):
            ids = ids_of(batch)
            assert plain(batch) == plain(collate(ids)), f"seed {seed}"
            seen += accelerator.gather_for_metrics(torch.tensor(ids)).tolist()
        assert seen == list(range(length)), seed


@ranks(2)
def test_padded_rows_and_strings_stay_together(rank: int, world: int) -> None:
    """Batches padded to their longest row have different widths on the ranks."""

    def collate(ids: list[int]) -> Any:
        width = max(ids) + 1
        return {
            "ids": torch.tensor(ids),
            "row": torch.tensor([[index] * width for index in ids]),
            "text": [f"s{i}" for i in ids],
        }

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    seen: list[int] = []
    for batch in accelerator.prepare(DataLoader(Stream(10), batch_size=3, collate_fn=collate)):
        ids = ids_of(batch)
        assert batch["text"] == [f"s{index}" for index in ids]
        assert batch["row"][:, 0].tolist() == ids
        seen += accelerator.gather_for_metrics(batch["ids"]).tolist()
    assert seen == list(range(10))


@ranks(2)
def test_what_is_uncertain_is_refused_on_all_ranks(rank: int, world: int) -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = DataLoader(Stream(8), batch_size=2, collate_fn=lambda ids: ([1, 2], [3, 4]))
    with pytest.raises(ValueError, match=r"not certain how to split.*2 lists of 2 entries.*dispatch_batches=False"):
        list(accelerator.prepare(loader))


def test_a_short_batch_is_told_from_a_list_that_is_as_long_as_a_full_one() -> None:
    columns = SampleColumns(4)
    names = ["a", "b", "c", "d"]
    full, short = ({"x": torch.arange(size), "text": ["t"] * size, "names": [*names, "e"]} for size in (4, 3))
    assert columns.size(full) == 4
    assert columns.size({**short, "names": names}) == 3
    part = columns.part({**short, "names": names}, 0, 2, 0, 2)
    assert (part["x"].tolist(), part["text"], part["names"]) == ([0, 1], ["t", "t"], names)


def test_a_batch_whose_leaves_have_other_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not certain how to split one with no leaf that has samples.*tensor\[3\]"):
        SampleColumns(2).size([torch.ones(3), "name"])
