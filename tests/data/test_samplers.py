"""Samplers whose order depends on seed and epoch alone."""

import pickle

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from accel_data.samplers import SeedableRandomSampler, get_sampler


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    first = SeedableRandomSampler(range(20), data_seed=3)
    torch.rand(7)
    second = SeedableRandomSampler(range(20), data_seed=3)
    orders = [list(first) for _ in range(3)]
    assert orders == [list(second) for _ in range(3)]
    assert orders[0] != orders[1] != orders[2]
    second.set_epoch(1)
    assert list(second) == orders[1]
    assert sorted(orders[0]) == list(range(20))


def test_another_seed_is_another_order() -> None:
    assert list(SeedableRandomSampler(range(20), data_seed=3)) != list(SeedableRandomSampler(range(20), data_seed=4))


def test_without_a_seed_that_of_torch_counts() -> None:
    torch.manual_seed(11)
    first = list(SeedableRandomSampler(range(20)))
    torch.manual_seed(11)
    assert first == list(SeedableRandomSampler(range(20)))


def test_it_goes_on_after_a_restart() -> None:
    sampler = SeedableRandomSampler(range(20), data_seed=3, generator=None)
    list(sampler)
    sampler.generator = None  # generators do not travel
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)


def test_the_sampler_of_indices_is_found() -> None:
    assert isinstance(get_sampler(DataLoader(range(4), shuffle=True)), RandomSampler)
    batches = BatchSampler(SequentialSampler(range(4)), 2, False)
    assert get_sampler(DataLoader(range(4), batch_sampler=batches)) is batches.sampler
    assert get_sampler(DataLoader(range(4), sampler=batches, batch_size=None)) is batches.sampler
