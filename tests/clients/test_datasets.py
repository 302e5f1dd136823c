"""Data of the datasets library through `prepare`: each sample once over all processes, epochs, going on."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from tests.support.ranks import ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs datasets")


def table(count: int) -> Any:
    """Rows with a number, a vector and a text, the text of different lengths."""
    import datasets

    rows = {
        "number": list(range(count)),
        "vector": [[float(index), float(-index)] for index in range(count)],
        "text": ["word " * (1 + index % 3) for index in range(count)],
    }
    return datasets.Dataset.from_dict(rows)


def make(**config: Any) -> Accelerator:
    AcceleratorState._reset_state(), GradientState._reset_state()
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))


def numbers(loader: Any) -> list[list[int]]:
    return [batch["number"].tolist() for batch in loader]


def from_everyone(mine: list[list[int]]) -> list[int]:
    """The numbers that all processes saw, sorted."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [number for batch in mine for number in batch])
    return sorted(number for numbers in found for number in numbers)


@ranks(2)
def test_rows_of_a_table_come_once(rank: int, world: int) -> None:
    data = table(22).with_format("torch", columns=["number", "vector"])
    for config in ({}, {"dispatch_batches": True}, {"split_batches": True}, {"even_batches": False}):
        accelerator = make(use_seedable_sampler=True, data_seed=1, **config)
        loader = accelerator.prepare(DataLoader(data, batch_size=4, shuffle=True))
        epochs = []
        for _ in range(2):
            counted = []
            for batch in loader:
                assert torch.equal(batch["vector"][:, 0], batch["number"].float())
                counted += (
                    accelerator.gather_for_metrics(batch["number"]).tolist() if "even" not in str(config) else []
                )
            epochs.append(counted)
        if "even_batches" in config:
            assert from_everyone(numbers(loader)) == list(range(22))
            continue
        assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(22))
        assert epochs[0] != epochs[1]


@ranks(2)
def test_texts_travel_to_those_who_read_them(rank: int, world: int) -> None:
    """Strings stay where they are read; numbers become tensors on the device."""
    accelerator = make()
    loader = accelerator.prepare(DataLoader(table(12).with_format("torch"), batch_size=3))
    seen = [
        (number, text)
        for batch in loader
        for number, text in zip(batch["number"].tolist(), batch["text"], strict=True)
    ]
    assert all(text == "word " * (1 + number % 3) for number, text in seen)
    assert len(seen) == 6


@ranks(2)
@pytest.mark.parametrize("shards", [4, 3])
def test_a_stream_is_read_once_by_all_together(rank: int, world: int, shards: int) -> None:
    """The first process reads, whatever the number of shards."""
    accelerator = make()
    stream = table(24).to_iterable_dataset(num_shards=shards).with_format("torch").remove_columns(["text"])
    loader = accelerator.prepare(DataLoader(stream, batch_size=3))
    assert from_everyone(numbers(loader)) == list(range(24))
    assert from_everyone(numbers(loader)) == list(range(24))


@ranks(2)
def test_a_stream_that_was_split_by_the_library(rank: int, world: int) -> None:
    """As the library's own guide does it: each process holds its part, and the loader is not to share it out again."""
    from datasets.distributed import split_dataset_by_node

    stream = table(24).to_iterable_dataset(num_shards=4).remove_columns(["text"])
    mine = split_dataset_by_node(stream, rank=rank, world_size=world).with_format("torch")
    found = numbers(DataLoader(mine, batch_size=3))
    assert from_everyone(found) == list(range(24))


@ranks(2)
@pytest.mark.parametrize("shards", [4, 3])
def test_epochs_shuffle_a_stream_anew(rank: int, world: int, shards: int) -> None:
    accelerator = make()
    stream = table(24).to_iterable_dataset(num_shards=shards).remove_columns(["text"]).shuffle(seed=3, buffer_size=24)
    loader = accelerator.prepare(DataLoader(stream.with_format("torch"), batch_size=3))
    first, second = numbers(loader), numbers(loader)
    assert from_everyone(first) == from_everyone(second) == list(range(24))
    assert first != second, "the epoch reached the stream"
    loader.set_epoch(0)
    assert numbers(loader) == first


@pytest.mark.skipif(importlib.util.find_spec("torchdata") is None, reason="needs torchdata")
@ranks(2)
@pytest.mark.parametrize("shards", [None, 4, 3])
def test_a_stateful_loader_goes_on_where_it_was(rank: int, world: int, shards: int | None) -> None:
    data = table(24).remove_columns(["text"])
    data = (
        data.with_format("torch")
        if shards is None
        else data.to_iterable_dataset(num_shards=shards).with_format("torch")
    )

    def prepared() -> Any:
        return make(use_stateful_dataloader=True).prepare(DataLoader(data, batch_size=3))

    loader = prepared()
    seen, state = [], None
    for index, batch in enumerate(loader):
        seen.append(batch["number"].tolist())
        if index == 1:
            state = loader.state_dict()
    again = prepared()
    again.load_state_dict(state)
    assert numbers(again) == seen[2:]
    assert from_everyone(seen) == list(range(24))


@ranks(2)
def test_batches_that_were_seen_are_skipped(rank: int, world: int) -> None:
    for data in (table(24), table(24).to_iterable_dataset(num_shards=4), table(24).to_iterable_dataset(num_shards=3)):
        loader = make().prepare(DataLoader(data.remove_columns(["text"]).with_format("torch"), batch_size=3))
        whole = numbers(loader)
        assert numbers(skip_first_batches(loader, 2)) == whole[2:]


@ranks(2)
def test_parts_of_a_table_and_preparing_it_on_one_process_first(rank: int, world: int, tmp_path: Any) -> None:
    accelerator = make()
    with accelerator.split_between_processes(table(7)) as part:
        assert part["number"] == [[0, 1, 2, 3], [4, 5, 6]][rank]
    with accelerator.main_process_first():
        doubled = table(7).map(
            lambda row: {"number": 2 * row["number"]}, cache_file_name=str(tmp_path / "cache.arrow")
        )
    assert doubled["number"] == list(range(0, 14, 2))


PIPELINES: dict[str, Callable[[], Any]] = {
    "plain": lambda: stream(4),
    "3 shards": lambda: stream(3),
    "take": lambda: stream(4).take(7),
    "take 1": lambda: stream(4).take(1),
    "skip": lambda: stream(4).skip(7),
    "numbers": lambda: stream(4).map(numbered, with_indices=True),
    "filter": lambda: stream(4).filter(every_third),
    "shuffle, take": lambda: stream(4).shuffle(seed=3, buffer_size=5).take(7),
    "repeat, skip": lambda: stream(2).repeat(2).skip(3),
    "interleave, take": lambda: datasets().interleave_datasets([stream(2), stream(2).skip(7)]).take(9),
    "concatenate, numbers": lambda: (
        datasets().concatenate_datasets([stream(2), stream(4)]).map(numbered, with_indices=True)
    ),
    "filter, take, shuffle": lambda: stream(4).filter(every_third).take(5).shuffle(seed=1, buffer_size=2),
}


def datasets() -> Any:
    return importlib.import_module("datasets")


def stream(num_shards: int) -> Any:
    return table(24).to_iterable_dataset(num_shards=num_shards).select_columns(["number"])


def numbered(example: dict[str, int], index: int) -> dict[str, int]:
    return {"number": 100 * index + example["number"]}


def every_third(example: dict[str, int]) -> bool:
    return example["number"] % 3 == 0


@pytest.mark.sample(1)
@ranks(2, 3, 4)
def test_what_a_stream_chooses_and_numbers_is_that_of_one_process(rank: int, world: int) -> None:
    for dispatch in (None, False):
        accelerator = make(dispatch_batches=dispatch)
        for name, pipeline in PIPELINES.items():
            loader = accelerator.prepare(DataLoader(pipeline().with_format("torch"), batch_size=2))
            read = torch.cat([accelerator.gather_for_metrics(batch["number"]) for batch in loader]).tolist()
            assert read == [example["number"] for example in pipeline()], (name, dispatch)
