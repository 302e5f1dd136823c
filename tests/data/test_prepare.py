"""From a `DataLoader` to a prepared one, seen from one process that plays any rank."""

import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from accel_data.dispatcher import DataLoaderDispatcher
from accel_data.loader_shard import DataLoaderShard
from accel_data.prepare import prepare_data_loader
from accel_data.samplers import BatchSamplerShard, SeedableRandomSampler
from accel_data.streams import IterableDatasetShard
from accel_state.gradient_state import GradientState
from tests.data.sharing import Numbers, SizedNumbers, sizes


class Squares(Dataset):  # type: ignore[type-arg]
    """Knows which items were asked for."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def rounds_of(loaders: list) -> Iterator[tuple[list[int], bool, int]]:
    """All samples of each round in the order `gather` gives, whether it is the last, and what the loaders make of it."""
    epochs = [[(batch.tolist(), loader.end_of_dataloader, loader.remainder) for batch in loader] for loader in loaders]
    for shares in zip(*epochs, strict=True):
        batches, ends, remainders = zip(*shares, strict=True)
        assert len({*ends}) == len({*remainders}) == 1
        yield [sample for batch in batches for sample in batch], ends[0], remainders[0]


def for_metrics(loaders: list) -> list[int]:
    """What `gather_for_metrics` gathers over an epoch."""
    actual: list[int] = []
    for samples, is_last, remainder in rounds_of(loaders):
        actual += samples[:remainder] if is_last and remainder > 0 else samples
    return actual


@settings(max_examples=40, deadline=None)
@given(sizes)
def test_metrics_see_exactly_the_data_set(case: dict) -> None:
    length, world = case["length"], case["world"]
    size = case["per_process"] * (world if case["split"] else 1)
    whole = list(range(length - length % (case["per_process"] * world) if case["drop_last"] else length))
    options = {"num_processes": world, "split_batches": case["split"], "dispatch_batches": False}
    for data in (Squares(length), Numbers(length), SizedNumbers(length)):
        if length == 0 and isinstance(data, Squares):
            continue
        plain = DataLoader(data, batch_size=size, drop_last=case["drop_last"])
        loaders = [prepare_data_loader(plain, process_index=rank, **options) for rank in range(world)]
        for _ in range(2):
            assert for_metrics(loaders) == whole
        if not isinstance(data, Numbers):
            assert {len(loader) for loader in loaders} == {len(list(loaders[0]))}
            assert loaders[0].total_dataset_length == length
        assert loaders[0].total_batch_size == case["per_process"] * world


def test_shuffling_by_seed_gives_all_processes_the_same_order() -> None:
    plain = DataLoader(Squares(23), batch_size=2, shuffle=True)
    loaders = [
        prepare_data_loader(plain, num_processes=3, process_index=rank, use_seedable_sampler=True, data_seed=5)
        for rank in range(3)
    ]
    assert all(isinstance(loader.get_sampler(), SeedableRandomSampler) for loader in loaders)
    first, second = for_metrics(loaders), for_metrics(loaders)
    assert sorted(first) == sorted(second) == list(range(23))
    assert first != second
    for loader in loaders:
        loader.set_epoch(0)
    assert for_metrics(loaders) == first


def test_a_random_sampler_without_generator_gets_one_to_synchronise() -> None:
    plain = DataLoader(Squares(8), shuffle=True)
    loader = prepare_data_loader(plain, num_processes=2, process_index=1, rng_types=["generator"])
    assert isinstance(loader.synchronized_generator, torch.Generator)
    assert loader.synchronized_generator is plain.sampler.generator  # type: ignore[attr-defined]
    assert loader.rng_types == ["generator"]


def test_the_kind_of_loader_follows_from_data_and_settings() -> None:
    numbers = DataLoader(Numbers(4), batch_size=2)
    assert isinstance(prepare_data_loader(numbers, num_processes=2, put_on_device=True), DataLoaderDispatcher)
    shard = prepare_data_loader(numbers, num_processes=2, process_index=0)
    assert isinstance(shard, DataLoaderShard)
    assert isinstance(shard.dataset, IterableDatasetShard)
    alone = prepare_data_loader(DataLoader(Squares(4), batch_size=2))
    assert isinstance(alone, DataLoaderShard)
    assert isinstance(alone, DataLoader)
    assert alone.batch_sampler.batch_size == 2
    two = prepare_data_loader(DataLoader(Squares(4), batch_size=2), num_processes=2, process_index=0)
    assert isinstance(two.batch_sampler, BatchSamplerShard)
    with pytest.raises(AttributeError, match="no_such_name"):
        two.no_such_name  # noqa: B018


def test_a_sampler_of_batches_stays_a_sampler() -> None:
    batches = BatchSampler(SequentialSampler(range(6)), 2, False)
    plain = DataLoader(TensorDataset(torch.arange(6)), sampler=batches, batch_size=None)
    loaders = [prepare_data_loader(plain, num_processes=2, process_index=rank) for rank in range(2)]
    assert [[batch[0].tolist() for batch in loader] for loader in loaders] == [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]


@pytest.mark.skipif("coverage" in sys.modules, reason="forked workers now and then die under coverage")
def test_workers_read_what_one_process_would() -> None:
    plain = DataLoader(Squares(11), batch_size=2, num_workers=1, persistent_workers=True)
    loaders = [prepare_data_loader(plain, num_processes=2, process_index=rank) for rank in range(2)]
    assert loaders[0].num_workers == 1
    assert for_metrics(loaders) == list(range(11))


def test_the_gradient_state_knows_the_last_batch() -> None:
    state = GradientState()
    loader = prepare_data_loader(DataLoader(Squares(5), batch_size=2))
    inner = prepare_data_loader(DataLoader(Squares(2), batch_size=2))
    seen = []
    for _ in loader:
        seen.append((state.end_of_dataloader, state.remainder, state.active_dataloader is loader))
        for _ in inner:
            assert state.active_dataloader is inner
    assert seen == [(False, 1, True), (False, 1, True), (True, 1, True)]
    assert not state.in_dataloader
    for _ in loader:
        break
    assert not state.in_dataloader, "leaving early counts as the end"


def test_a_loader_travels_and_forgets_nothing() -> None:
    loader = prepare_data_loader(DataLoader(Squares(5), batch_size=2), num_processes=2, process_index=1)
    for other in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert type(other) is DataLoaderShard
        assert [batch.tolist() for batch in other] == [[2, 3], [1, 2]]
        assert other.gradient_state.active_dataloader is None


def test_batches_move_to_the_device_asked_for() -> None:
    plain = DataLoader(Squares(2), batch_size=2)
    assert next(iter(prepare_data_loader(plain, torch.device("meta"), put_on_device=True))).device.type == "meta"
    assert next(iter(prepare_data_loader(plain, torch.device("meta")))).device.type == "cpu"


def test_the_epoch_reaches_data_set_and_sampler() -> None:
    class Epochs(Squares):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    class Sampler(SequentialSampler):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    data = Epochs(4)
    sampler = Sampler(data)
    loader = prepare_data_loader(DataLoader(data, sampler=sampler), num_processes=2, process_index=0)
    for epoch in range(2):
        list(loader)
        assert (data.epoch, sampler.epoch, loader.iteration) == (epoch, epoch, epoch + 1)
    loader.set_epoch(7)
    assert (data.epoch, sampler.epoch) == (7, 7)


def test_the_given_settings_stay_as_they_are() -> None:
    kinds = ["torch", "generator"]
    prepare_data_loader(DataLoader(Squares(4)), rng_types=kinds)
    assert kinds == ["torch", "generator"]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("data", [Squares(8), Numbers(8)], ids=["indexed", "stream"])
@pytest.mark.parametrize("dispatch", [False, True])
def test_batches_that_cannot_be_cut_are_refused(size: int, data: Dataset, dispatch: bool) -> None:
    plain = DataLoader(data, batch_size=size)
    options = {"split_batches": True, "dispatch_batches": dispatch, "put_on_device": dispatch}
    with pytest.raises(ValueError, match=f"batches of {size} evenly over 2 processes.*multiple of 2"):
        prepare_data_loader(plain, num_processes=2, process_index=0, **options)


def test_what_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(ValueError, match="put_on_device=False"):
        prepare_data_loader(DataLoader(Squares(4)), dispatch_batches=True)
    with pytest.raises(ValueError, match=r"batch_size=None.*Squares.*over 2 processes.*dispatch_batches=True"):
        prepare_data_loader(DataLoader(Squares(4), batch_size=None), num_processes=2, process_index=0)
    with pytest.raises(ValueError, match="split_batches=True needs to know the batch size"):
        prepare_data_loader(DataLoader(Squares(4), batch_size=None), split_batches=True)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("options", [{}, {"split_batches": True}, {"even_batches": False}])
def test_a_dataset_of_length_0_is_over_at_once(options: dict[str, bool], rank: int) -> None:
    with pytest.warns(UserWarning, match=r"Squares has length 0.*Check how the dataset was read"):
        loader = prepare_data_loader(
            DataLoader(Squares(0), batch_size=2), num_processes=2, process_index=rank, **options
        )
    assert len(loader) == 0
    assert [list(loader) for _ in range(2)] == [[], []]


@pytest.mark.parametrize(("count", "index"), [(2, 5), (2, -1), (0, 0)])
def test_a_shard_that_there_is_none_of(count: int, index: int) -> None:
    with pytest.raises(ValueError, match=f"process_index={index} is no shard of num_processes={count}"):
        prepare_data_loader(DataLoader(range(4)), num_processes=count, process_index=index)
    assert len(prepare_data_loader(DataLoader(range(4)), num_processes=1, process_index=1)) == 4


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("dispatch", [False, True])
def test_a_loop_over_a_loader_inside_its_own(dispatch: bool, leaves: bool) -> None:
    loader = prepare_data_loader(DataLoader(Squares(7), batch_size=2), put_on_device=True, dispatch_batches=dispatch)
    state, last, inner_last = GradientState(), [], []
    for step, _ in enumerate(loader):
        if step in (1, 3):
            for _ in loader:
                inner_last.append(state.end_of_dataloader)
                if leaves and state.end_of_dataloader:
                    break
        last.append((state.end_of_dataloader, state.remainder == loader.remainder))
    assert inner_last == [False, False, False, True] * 2
    assert last == [(False, True), (False, True), (False, True), (True, True)]
    assert not state.in_dataloader


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_last_batch_is_known_where_persistent_workers_were_started_before() -> None:
    plain = DataLoader(range(8), batch_size=2, num_workers=1, persistent_workers=True)
    loader = prepare_data_loader(plain)
    assert len(list(loader.base_dataloader)) == 4  # type: ignore[attr-defined] # by the program
    for _ in range(2):
        assert [loader.end_of_dataloader for _ in loader] == [False, False, False, True]  # type: ignore[attr-defined]


class Reusing(Sampler[Any]):
    """Yields one container again and again, with other indices in it."""

    def __init__(self, kind: Callable[[list[int]], Any]) -> None:
        self.kind = kind
        self.batch_sampler = BatchSampler(range(6), 2, False)  # as wrappers of torch's have

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        container = self.kind([0, 0])
        for first in (0, 2, 4):
            container[0], container[1] = first, first + 1
            yield container


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_sampler_may_yield_the_same_container_again(kind: Callable[[list[int]], Any]) -> None:
    loader = prepare_data_loader(DataLoader(torch.arange(6), batch_sampler=Reusing(kind)))  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
