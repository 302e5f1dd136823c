"""Who reads which sample: properties that hold for any length, batch size, number of processes and flags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from accel_data.batch_shard import BatchSamplerShard
from accel_data.iterable_shard import IterableDatasetShard
from accel_data.samplers import SeedableRandomSampler
from accel_data.skipping import SkipBatchSampler
from accel_data.split_stream import find_split

lengths, sizes, worlds = st.integers(0, 60), st.integers(1, 8), st.integers(1, 6)


class Stream(IterableDataset[int]):
    """Counts up, and counts how often it was read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.num_read = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for value in range(self.length):
            self.num_read += 1
            yield value


def shards(length: int, size: int, world: int, drop: bool, split: bool, even: bool) -> list[BatchSamplerShard]:
    return [
        BatchSamplerShard(BatchSampler(range(length), size, drop), world, rank, split_batches=split, even_batches=even)
        for rank in range(world)
    ]


def in_rounds(parts: list[list[list[int]]]) -> list[int]:
    """The samples in the order in which gathering round after round returns them."""
    longest = max(map(len, parts), default=0)
    return [sample for index in range(longest) for part in parts if index < len(part) for sample in part[index]]


@settings(max_examples=300, deadline=None)
@given(lengths, sizes, worlds, st.booleans(), st.booleans(), st.booleans())
def test_batches_are_shared_out_as_documented(
    length: int, size: int, world: int, drop: bool, split: bool, even: bool
) -> None:
    size = size * world if split else size
    samplers = shards(length, size, world, drop, split, even)
    parts = [list(sampler) for sampler in samplers]
    gathered = in_rounds(parts)
    per_round = size if split else size * world
    if drop:
        assert gathered == list(range(length // per_round * per_round))
    elif even:
        num_rounds = -(-length // per_round)
        assert [len(part) for part in parts] == [num_rounds] * world
        assert all(len(batch) == size // (world if split else 1) for part in parts for batch in part)
        # gather_for_metrics drops what filled the last round up
        remainder = length % per_round
        kept = gathered[: len(gathered) - per_round + remainder] if remainder else gathered
        assert kept == list(range(length))
        assert set(gathered) <= set(range(length))
    else:
        assert sorted(gathered) == list(range(length))
    if even or drop or not split:
        assert [len(sampler) for sampler in samplers] == [len(part) for part in parts]
    assert all(sampler.total_length == -(-length // size) or drop for sampler in samplers)


@settings(max_examples=200, deadline=None)
@given(lengths, sizes, worlds, st.booleans(), st.booleans())
def test_streams_are_shared_out_as_documented(length: int, size: int, world: int, drop: bool, split: bool) -> None:
    size = size * world if split else size
    parts = [IterableDatasetShard(Stream(length), size, drop, world, rank, split) for rank in range(world)]
    per_round = size if split else size * world
    share = per_round // world
    found = [list(part) for part in parts]
    assert len({len(part) for part in found}) == 1
    chunks = [[part[start : start + share] for start in range(0, len(part), share)] for part in found]
    gathered = in_rounds(chunks)
    full = length // per_round * per_round
    assert gathered[: full if drop else length] == list(range(full if drop else length))
    assert len(gathered) == (full if drop else -(-length // per_round) * per_round)
    assert all(part.last_round_size == length % per_round for part in parts)
    assert all(part.total_length == length for part in parts)


def test_a_short_batch_in_the_middle_is_not_lost() -> None:
    class Uneven(BatchSampler):
        def __init__(self) -> None:
            self.batch_size, self.drop_last = 2, False

        def __iter__(self) -> Iterator[list[int]]:
            yield from [[0, 1], [2], [3, 4], [5, 6]]

        def __len__(self) -> int:
            return 4

    parts = [list(BatchSamplerShard(Uneven(), 2, rank, even_batches=False)) for rank in range(2)]
    assert parts == [[[0, 1], [3, 4]], [[2], [5, 6]]]


@settings(max_examples=50, deadline=None)
@given(lengths, sizes, st.integers(0, 12))
def test_skipping_reads_nothing_twice(length: int, size: int, skipped: int) -> None:
    sampler = SkipBatchSampler(BatchSampler(range(length), size, False), skipped)
    assert list(sampler) == list(BatchSampler(range(length), size, False))[skipped:]
    assert len(sampler) == len(list(sampler))
    assert sampler.batch_size == size


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="batches of 5 evenly between 2 processes"):
        BatchSamplerShard(BatchSampler(range(10), 5, False), 2, 0, split_batches=True)
    with pytest.raises(ValueError, match="has no batch_size"):
        BatchSamplerShard([[0, 1], [2]], 2, 0)
    with pytest.raises(ValueError, match="batches of 5 evenly"):
        IterableDatasetShard(Stream(3), 5, num_processes=2, split_batches=True)


def test_seedable_sampler_shuffles_by_seed_and_epoch() -> None:
    one = SeedableRandomSampler(range(20), data_seed=3)
    first, second = list(one), list(one)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    other = SeedableRandomSampler(range(20), data_seed=3)
    torch.rand(5)  # other random numbers in between do not matter
    other.set_epoch(1)
    assert list(other) == second


def test_a_stream_reseeds_its_generator_each_epoch() -> None:
    class Shuffled(Stream):
        generator = torch.Generator()

        def __iter__(self) -> Iterator[int]:
            yield from RandomSampler(range(self.length), generator=self.generator)  # type: ignore[arg-type]

    shard = IterableDatasetShard(Shuffled(10), 2, num_processes=2, process_index=0)
    first = list(shard)
    assert list(shard) == first
    shard.set_epoch(1)
    assert list(shard) != first


class Sharded(Stream):
    """A stream of shards, each a range of its own."""

    num_shards = 4

    def shard(self, num_shards: int, index: int) -> Any:
        return range(index, self.length, num_shards)


def test_splitting_at_the_source() -> None:
    assert find_split(Stream(8), 0, 2) is None
    assert list(find_split(Sharded(8), 1, 2)) == [1, 3, 5, 7]
    assert find_split(Sharded(8), 0, 3) is None, "four shards do not divide by three"
    own = Stream(3)
    own.is_split_for_process = True  # type: ignore[attr-defined]
    assert find_split(own, 0, 2) is own
    asked = Stream(3)
    asked.split_for_process = lambda index, count: (index, count)  # type: ignore[attr-defined]
    assert find_split(asked, 1, 2) == (1, 2)
