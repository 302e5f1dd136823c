"""Sharing out a batch sampler: every sample appears exactly as documented."""

import pytest
from hypothesis import given
from torch.utils.data import BatchSampler, SequentialSampler

from accel_data.samplers import BatchSamplerShard
from tests.data.sharing import padded_samples, shard_of, sizes


def shards(case: dict, even: bool) -> list[BatchSamplerShard]:
    size = case["per_process"] * (case["world"] if case["split"] else 1)
    sampler = BatchSampler(SequentialSampler(range(case["length"])), size, case["drop_last"])
    return [
        BatchSamplerShard(sampler, case["world"], rank, split_batches=case["split"], even_batches=even)
        for rank in range(case["world"])
    ]


@given(sizes)
def test_even_batches_fill_the_last_round_with_the_first_samples(case: dict) -> None:
    samples = padded_samples(case["length"], case["per_process"] * case["world"], case["drop_last"])
    for rank, shard in enumerate(shards(case, even=True)):
        assert list(shard) == shard_of(samples, case["per_process"], case["world"], rank)
        assert len(shard) == len(list(shard))


@given(sizes)
def test_uneven_batches_hold_every_sample_once(case: dict) -> None:
    actual = [list(shard) for shard in shards(case, even=False)]
    every = sorted(sample for batches in actual for batch in batches for sample in batch)
    assert every == (
        padded_samples(case["length"], case["per_process"] * case["world"], True)
        if case["drop_last"]
        else list(range(case["length"]))
    )
    counts = [len(batches) for batches in actual]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1, "no process is more than one batch ahead"


@given(sizes)
def test_uneven_lengths_agree_unless_a_slice_is_empty(case: dict) -> None:
    for shard in shards(case, even=False):
        if not case["split"]:
            assert len(shard) == len(list(shard))
        else:
            assert 0 <= len(shard) - len(list(shard)) <= 1


@given(sizes)
def test_dropping_the_remainder_gives_the_data_set(case: dict) -> None:
    case = case | {"drop_last": False}
    global_size = case["per_process"] * case["world"]
    rounds = zip(*(list(shard) for shard in shards(case, even=True)), strict=True)
    gathered = [[sample for batch in batches for sample in batch] for batches in rounds]
    if case["length"] % global_size:
        gathered[-1] = gathered[-1][: case["length"] % global_size]
    assert [sample for batch in gathered for sample in batch] == list(range(case["length"]))


def test_a_short_batch_in_the_middle_is_dealt_out_like_any_other() -> None:
    class Ragged(BatchSampler):
        batch_size, drop_last = 2, False

        def __init__(self) -> None:
            pass

        def __iter__(self):
            yield from ([0, 1], [2], [3, 4], [5, 6])

        def __len__(self) -> int:
            return 4

    assert list(BatchSamplerShard(Ragged(), 2, 0)) == [[0, 1], [3, 4]]
    assert list(BatchSamplerShard(Ragged(), 2, 1)) == [[2], [5, 6]]


def test_a_batch_that_cannot_be_cut_is_refused_with_the_way_out() -> None:
    sampler = BatchSampler(SequentialSampler(range(8)), 3, False)
    with pytest.raises(ValueError, match="batches of 3 evenly over 2 processes.*multiple of 2"):
        BatchSamplerShard(sampler, 2, 0, split_batches=True)
    with pytest.raises(ValueError, match=r"split_batches=True cannot split batches of unknown size .*no batch_size"):
        BatchSamplerShard([[0, 1], [2, 3]], 2, 0, split_batches=True)


def test_batches_of_any_size_fill_up_the_last_round_as_they_are() -> None:
    class Anything:
        def __iter__(self):
            yield from ([0], [1, 2], [3])

        def __len__(self) -> int:
            return 3

    shares = [BatchSamplerShard(Anything(), 2, rank) for rank in (0, 1)]
    assert [list(share) for share in shares] == [[[0], [3]], [[1, 2], [0]]]
    assert [len(share) for share in shares] == [2, 2]
    many = [list(BatchSamplerShard(Anything(), 8, rank)) for rank in range(8)]
    assert many == [[[0]], [[1, 2]], [[3]], [[0]], [[1, 2]], [[3]], [[0]], [[1, 2]]]
    assert [list(BatchSamplerShard(Anything(), 2, rank, even_batches=False)) for rank in (0, 1)] == [
        [[0], [3]],
        [[1, 2]],
    ]
