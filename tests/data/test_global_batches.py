"""One process that reads for several devices: the batches that as many processes would read."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from accel_data.global_batches import GlobalBatches, with_global_batches
from accel_data.prepare import prepare_data_loader
from accel_data.samplers import BatchSamplerShard
from tests.data.sharing import sizes


@given(sizes)
def test_they_hold_what_as_many_processes_read_together(case: dict[str, Any]) -> None:
    sampler = BatchSampler(SequentialSampler(range(case["length"])), case["per_process"], case["drop_last"])
    shards = [list(BatchSamplerShard(sampler, case["world"], rank)) for rank in range(case["world"])]
    joined = GlobalBatches(sampler, case["world"])
    assert list(joined) == [[index for batch in step for index in batch] for step in zip(*shards, strict=True)]
    assert len(joined) == len(list(joined))


@given(sizes)
def test_uneven_ones_hold_every_sample_once(case: dict[str, Any]) -> None:
    sampler = BatchSampler(SequentialSampler(range(case["length"])), case["per_process"], False)
    joined = GlobalBatches(sampler, case["world"], even_batches=False)
    assert [index for batch in joined for index in batch] == list(range(case["length"]))


def test_samplers_without_a_batch_size_are_joined_and_not_padded() -> None:
    class Grouped:
        def __iter__(self) -> Any:
            return iter([[0, 1], [2], [3, 4, 5]])

        def __len__(self) -> int:
            return 3

    assert list(GlobalBatches(Grouped(), 2)) == [[0, 1, 2], [3, 4, 5]]


def test_prepared_loaders_know_the_whole() -> None:
    data = TensorDataset(torch.arange(10.0))
    loader = prepare_data_loader(with_global_batches(DataLoader(data, batch_size=2), 2, True), num_processes=1)
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    assert (loader.total_batch_size, loader.total_dataset_length) == (4, 10)  # type: ignore[attr-defined]


def test_a_seedable_sampler_is_found_inside() -> None:
    data = TensorDataset(torch.arange(10.0))
    orders = []
    for num_joined in (1, 5):
        wide = with_global_batches(
            DataLoader(data, batch_size=2 if num_joined == 5 else 10, shuffle=True), num_joined, True
        )
        loader = prepare_data_loader(wide, num_processes=1, use_seedable_sampler=True, data_seed=3)
        orders.append([[batch[0].tolist() for batch in loader] for _ in range(2)])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]


def test_streams_are_padded_too() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(range(5))

    wide = with_global_batches(DataLoader(Stream(), batch_size=2), 2, even_batches=True)
    assert [batch.tolist() for batch in wide] == [[0, 1, 2, 3], [4, 0, 1, 2]]
    wide = with_global_batches(DataLoader(Stream(), batch_size=2), 2, even_batches=False)
    assert [batch.tolist() for batch in wide] == [[0, 1, 2, 3], [4]]
