"""Sharing out a stream that every process reads in full."""

import pytest
import torch
from hypothesis import given

from accel_data.streams import IterableDatasetShard
from tests.data.sharing import Numbers, SizedNumbers, padded_samples, shard_of, sizes


def shards(case: dict, stream: type = Numbers) -> list[IterableDatasetShard]:
    size = case["per_process"] * (case["world"] if case["split"] else 1)
    return [
        IterableDatasetShard(
            stream(case["length"]), size, case["drop_last"], case["world"], rank, split_batches=case["split"]
        )
        for rank in range(case["world"])
    ]


@given(sizes)
def test_each_process_takes_its_part_of_every_round(case: dict) -> None:
    samples = padded_samples(case["length"], case["per_process"] * case["world"], case["drop_last"])
    for rank, shard in enumerate(shards(case)):
        wanted = shard_of(samples, case["per_process"], case["world"], rank)
        assert list(shard) == [sample for batch in wanted for sample in batch]


@given(sizes)
def test_the_end_of_the_stream_tells_how_much_of_the_last_round_is_real(case: dict) -> None:
    shard = shards(case)[0]
    assert shard.last_batch_size == -1
    list(shard)
    assert shard.last_batch_size == case["length"] % (case["per_process"] * case["world"])


@given(sizes)
def test_a_stream_that_knows_its_length_passes_it_on(case: dict) -> None:
    case = case | {"split": False}
    for shard in shards(case, SizedNumbers):
        assert len(shard) == len(list(shard))
        assert shard.total_length == case["length"]


def test_the_epoch_reaches_the_stream() -> None:
    class Shuffled(Numbers):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    shard = IterableDatasetShard(Shuffled(3))
    shard.set_epoch(4)
    assert (shard.epoch, shard.dataset.epoch) == (4, 4)


def test_a_stream_with_a_generator_is_seeded_by_the_epoch() -> None:
    class Drawn(Numbers):
        generator = torch.Generator()

        def __iter__(self):
            yield from torch.randperm(self.length, generator=self.generator).tolist()

    shard = IterableDatasetShard(Drawn(50), batch_size=50)
    first, again = list(shard), list(shard)
    shard.set_epoch(1)
    assert first == again != list(shard)


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="batches of 3 evenly over 2 processes"):
        IterableDatasetShard(Numbers(4), 3, num_processes=2, split_batches=True)
