"""Loaders that the program has sharded by rank itself, and ranks that disagree on what they shard."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    random_split,
)

from accel_data.prepare import prepare_data_loader
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState
from tests.support.ranks import ranks

NUM_SAMPLES = 18
DATA: Any = list(range(NUM_SAMPLES))


def mine() -> list[int]:
    return DATA[dist.get_rank() :: dist.get_world_size()]


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(mine())


class StreamThatSaysSo(Stream):
    is_split_for_process = True


class OwnSampler(Sampler):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(mine())

    def __len__(self) -> int:
        return len(mine())


class OwnBatches(OwnSampler):
    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        return (mine()[start : start + 2] for start in range(0, len(mine()), 2))

    def __len__(self) -> int:
        return -(-len(mine()) // 2)


def distributed(shuffle: bool = False) -> DataLoader:  # type: ignore[type-arg]
    return DataLoader(DATA, 2, sampler=DistributedSampler(DATA, shuffle=shuffle))


SHARDED: dict[str, Callable[[], Any]] = {
    "sampler": lambda: DataLoader(DATA, 2, sampler=OwnSampler()),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=OwnBatches()),
    "batches as sampler": lambda: DataLoader(torch.tensor(DATA), batch_size=None, sampler=OwnBatches()),
    "subset": lambda: DataLoader(Subset(DATA, mine()), 2),
    "shuffled subset": lambda: DataLoader(Subset(DATA, mine()), 2, shuffle=True),
    "stream": lambda: DataLoader(Stream(), 2),
    "stream of batches": lambda: DataLoader(Stream(), None),
}
SAYS_SO: dict[str, Callable[[], Any]] = {
    "DistributedSampler": distributed,
    "shuffled": lambda: distributed(shuffle=True),
    "stream": lambda: DataLoader(StreamThatSaysSo(), 2),
}


def make(**config: Any) -> Accelerator:
    AcceleratorState._reset_state()
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))


def read(accelerator: Accelerator, loader: Any) -> list[int]:
    """What `gather_for_metrics` returns in an epoch."""
    return torch.cat(
        [accelerator.gather_for_metrics(torch.atleast_1d(torch.as_tensor(batch))) for batch in loader]
    ).tolist()


@ranks(2, 4)
def test_each_sample_is_read_once(rank: int, world: int) -> None:
    for config, loaders in (({"already_sharded": True}, SHARDED), ({}, SAYS_SO)):
        accelerator = make(**config)
        for name, loader in loaders.items():
            if NUM_SAMPLES % world and not (name in SAYS_SO or "stream" in name):
                continue  # such shards differ in length: the program must use join_uneven_inputs
            prepared = accelerator.prepare(loader())
            for _ in range(2):
                assert sorted(read(accelerator, prepared)) == DATA, name


@ranks(2)
def test_a_shard_of_its_own_cannot_be_shared_out(rank: int, world: int) -> None:
    for option in ("dispatch_batches", "split_batches"):
        with pytest.raises(ValueError, match=f"so {option}=True has nothing to do"):
            DataLoaderConfiguration(already_sharded=True, **{option: True})
        for name in ("DistributedSampler", "stream"):
            with pytest.raises(ValueError, match=f"{option}=True .* yields each process's own shard already"):
                make(**{option: True}).prepare(SAYS_SO[name]())
    wrong: Any = DistributedSampler(DATA, num_replicas=4, rank=rank)
    with pytest.raises(
        ValueError, match=f"DistributedSampler yields the shard of rank {rank} of 4, .* reads shard {rank} of 2"
    ):
        make().prepare(DataLoader(DATA, 2, sampler=wrong))
    sampler: Any = OwnSampler()  # with the attributes that samplers of many libraries have
    sampler.rank, sampler.num_replicas = rank, world
    assert [batch.tolist() for batch in make().prepare(DataLoader(DATA, 9, sampler=sampler))] == [mine()]
    prepare_data_loader(DataLoader(DATA, 2, sampler=wrong), num_processes=1, process_index=0)  # asks for it as it is


@ranks(2)
def test_ranks_that_iterate_different_samples_are_told(rank: int, world: int) -> None:
    class Shuffled(OwnSampler):
        def __iter__(self) -> Iterator[int]:
            return iter(random.sample(DATA, len(DATA)))

    def split() -> DataLoader:  # type: ignore[type-arg]
        return DataLoader(random_split(DATA, [12, 6])[0], 2)

    def fails(loader: Any) -> None:
        batches = iter(make().prepare(loader))
        if rank == 0:  # comes first, and learns of it after rank 1
            next(batches)
        for turn in (1, 0):
            dist.barrier()
            if rank == turn:
                with pytest.raises(
                    ValueError, match="Ranks 0 and 1 iterate .*same seed on every rank; .*already_sharded=True"
                ):
                    list(batches)

    torch.manual_seed(rank)
    random.seed(rank)
    for loader in (SHARDED["sampler"], SHARDED["batch sampler"], SHARDED["subset"], split):
        fails(loader())
    fails(DataLoader(DATA, 2, sampler=Shuffled()))
    fails(DataLoader(DATA[: 18 - rank], 2))
    torch.manual_seed(0)
    random.seed(0)
    for right in (split(), DataLoader(DATA, 2, sampler=Shuffled()), DataLoader(DATA, 2, shuffle=True)):
        assert len(list(make().prepare(right))) > 2


@ranks(2)
def test_a_loader_that_one_rank_alone_reads_is_compared_with_none(rank: int, world: int) -> None:
    def prepared(data: Any) -> Any:
        return make().prepare(DataLoader(data, 2))

    if rank == 0:
        assert len(list(prepared(DATA[:8]))) == 2
    assert len(list(prepared(DATA))) == 5


@pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")
@ranks(2)
def test_rows_of_a_table_that_was_split_by_rank_are_warned_of(rank: int, world: int) -> None:
    import datasets

    table = datasets.Dataset.from_dict({"x": DATA})
    said: list[Any] = [None] * world
    for split in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(make().prepare(DataLoader(table.shard(world, rank) if split else table, 2)))
        dist.all_gather_object(
            said, [str(warning.message) for warning in caught if "different rows" in str(warning.message)]
        )
        assert sum(map(len, said)) == split


@ranks(2)
def test_an_epoch_of_a_shard_of_its_own_is_continued(rank: int, world: int, tmp_path: Path) -> None:
    def loaders() -> list[Any]:
        generator = torch.Generator().manual_seed(rank)
        return [
            DataLoader(Subset(DATA, mine()), 2, shuffle=True),
            DataLoader(DATA, 2, sampler=RandomSampler(DATA, replacement=True, generator=generator)),
            distributed(shuffle=True),
        ]

    for continues in (False, True):
        for number in range(3):
            accelerator, folder = (
                make(already_sharded=True, use_stateful_dataloader=continues),
                str(tmp_path / f"{number}{continues}"),
            )
            torch.manual_seed(rank)
            loader = accelerator.prepare(loaders()[number])
            list(loader)
            epoch = []
            for index, batch in enumerate(loader):
                epoch.append(batch.tolist())
                if index == 1:
                    accelerator.save_state(folder)
            following = [batch.tolist() for batch in loader]
            torch.manual_seed(7)
            accelerator = make(already_sharded=True, use_stateful_dataloader=continues)
            again = accelerator.prepare(loaders()[number])
            accelerator.load_state(folder)
            rest = again if continues else accelerator.skip_first_batches(again, 2)
            assert [batch.tolist() for batch in rest] == epoch[2:], number
            assert [batch.tolist() for batch in again] == following, number
