"""All ranks read one order, whatever random numbers each of them has drawn: otherwise samples are lost and repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler

from accel_data.prepare import prepare_data_loader
from accel_ops.collectives.objects import gather_object
from accel_ops.random import common_seed, set_seed
from tests.support.ranks import ranks

NUM_SAMPLES = 48


def epochs(loader: Any) -> list[list[int]]:
    """What all ranks together read in two epochs."""
    return [gather_object([sample for batch in loader for sample in batch.tolist()]) for _ in range(2)]


@ranks(2)
def test_a_seed_of_each_rank_s_own_is_none_of_the_order(rank: int) -> None:
    def read() -> list[list[int]]:
        return epochs(prepare_data_loader(DataLoader(range(NUM_SAMPLES), 2, shuffle=True), use_seedable_sampler=True))

    set_seed(5)
    same = read()
    set_seed(5, device_specific=True)
    assert torch.initial_seed() == 5 + rank
    assert read() == same
    assert [sorted(epoch) for epoch in same] == [list(range(NUM_SAMPLES))] * 2
    torch.manual_seed(99)
    assert common_seed() == 99, "a seed that the program sets later counts"


@ranks(2)
@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("own_generator", [False, True])
def test_samplers_that_draw_agree_where_ranks_have_drawn_differently(
    rank: int, seedable: bool, own_generator: bool
) -> None:
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(rank) if own_generator else None
    sampler = SubsetRandomSampler(range(NUM_SAMPLES), generator)
    plain: Any = DataLoader(range(NUM_SAMPLES), 2, sampler=sampler)
    loader = prepare_data_loader(plain, use_seedable_sampler=seedable, rng_types=["generator"])
    first, second = epochs(loader)
    assert sorted(first) == sorted(second) == list(range(NUM_SAMPLES))
    assert first != second
    numbers = gather_object([torch.rand(1).item()])
    assert numbers[0] != numbers[1], "each rank keeps random numbers of its own"


@ranks(2)
@pytest.mark.parametrize("seedable", [False, True])
def test_ranks_that_read_the_same_batches_agree_on_their_order(rank: int, seedable: bool) -> None:
    """As the stages of one replica do; an engine that knows no mesh says so by `num_processes=1`."""
    set_seed(3)
    torch.rand(rank)  # each makes another part of the model
    plain: Any = DataLoader(range(NUM_SAMPLES), 2, shuffle=True)
    whole = {"num_processes": 1, "process_index": 0, "use_seedable_sampler": seedable}
    loader = prepare_data_loader(plain, rng_types=["generator"], **whole)
    for _ in range(2):
        orders = gather_object([[sample for batch in loader for sample in batch.tolist()]])
        assert orders[0] == orders[1]
        assert sorted(orders[0]) == list(range(NUM_SAMPLES))
    if rank == 0:  # alone, and without waiting for the others
        assert len(list(prepare_data_loader(DataLoader(range(NUM_SAMPLES), 2, shuffle=True), **whole))) == 24
