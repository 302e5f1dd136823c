"""Checks of data loaders: every rank has its shard, and together they have each sample once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_state.devices import resolve_device
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.test_utils.scripts.checks.check import Process, checks, make_accelerator, need_data_parallelism, same
from accelerate.utils import gather_object

BATCH = 4


class Stream(IterableDataset[int]):
    """Yields 0, 1, 2, ..."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def prepared(dataset: Any, batch_size: int = BATCH, shuffle: bool = False, **settings: Any) -> tuple[Accelerator, Any]:
    """Make an accelerator with some settings for data, and a loader prepared by it."""
    accelerator = make_accelerator(dataloader_config=DataLoaderConfiguration(**settings))
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)
    return accelerator, accelerator.prepare_data_loader(loader)


def everything(accelerator: Accelerator, loader: Any) -> list[int]:
    """Gather the samples of all processes, without padding."""
    batches = [accelerator.gather_for_metrics(batch) for batch in loader]
    return torch.cat(batches).tolist() if batches else []


def sharding(process: Process) -> None:
    """Batches are assigned to the ranks in turn, and moved to their devices."""
    need_data_parallelism(process)
    count = 3 * BATCH * process.world
    accelerator, loader = prepared(torch.arange(count))
    same(len(loader), 3, "number of batches of a process")
    batches = list(loader)
    same({str(batch.device) for batch in batches}, {str(resolve_device(accelerator.device))}, "devices")
    first = BATCH * process.rank
    same(batches[0].tolist(), list(range(first, first + BATCH)), "the first batch")
    same(everything(accelerator, loader), list(range(count)), "all data")


def evening_out(process: Process) -> None:
    """By default all ranks have the same number of batches, and metrics see each sample once."""
    need_data_parallelism(process)
    count = 2 * BATCH * process.world + 1
    accelerator, loader = prepared(torch.arange(count))
    same(len(set(gather_object([sum(1 for _ in loader)]))), 1, "different numbers of batches")
    same(everything(accelerator, loader), list(range(count)), "all data")


def uneven(process: Process) -> None:
    """With even_batches=False there is no padding, and some ranks have fewer samples."""
    need_data_parallelism(process)
    count = 2 * BATCH * process.world + 1
    _, loader = prepared(torch.arange(count), even_batches=False)
    samples = [item for batch in loader for item in batch.tolist()]
    same(sorted(gather_object(samples)), list(range(count)), "all data")


def splitting_batches(process: Process) -> None:
    """With split_batches=True each batch is split between the ranks."""
    need_data_parallelism(process)
    size = 2 * process.world
    accelerator, loader = prepared(torch.arange(3 * size), batch_size=size, split_batches=True)
    same([len(batch) for batch in loader], [2, 2, 2], "sizes of a process's batches")
    same(everything(accelerator, loader), list(range(3 * size)), "all data")


def dispatching(process: Process) -> None:
    """With dispatch_batches=True the main process reads batches and scatters them."""
    need_data_parallelism(process)
    count = 2 * BATCH * process.world + 3
    accelerator, loader = prepared(Stream(count), dispatch_batches=True)
    same(everything(accelerator, loader), list(range(count)), "all data")


def streams(process: Process) -> None:
    """Each rank reads the stream and yields its shard."""
    need_data_parallelism(process)
    count = 2 * BATCH * process.world + 3
    accelerator, loader = prepared(Stream(count), dispatch_batches=False)
    same(sorted(everything(accelerator, loader)), list(range(count)), "all data")


def skipping(process: Process) -> None:
    """An epoch can be resumed after some of its batches."""
    need_data_parallelism(process)
    accelerator, loader = prepared(torch.arange(4 * BATCH * process.world))
    whole = [batch.tolist() for batch in loader]
    rest = [batch.tolist() for batch in accelerator.skip_first_batches(loader, 2)]
    same(rest, whole[2:], "batches after the second")


def shuffling(process: Process) -> None:
    """All ranks shuffle in the same order, which changes in the next epoch."""
    need_data_parallelism(process)
    count = 4 * BATCH * process.world
    accelerator, loader = prepared(torch.arange(count), shuffle=True, use_seedable_sampler=True)
    orders = [everything(accelerator, loader) for _ in range(2)]
    for order in orders:
        same(sorted(order), list(range(count)), "all data")
    same(orders[0] == orders[1], False, "two epochs in the same order")


LOADERS = checks(
    "data loaders",
    sharded=sharding,
    even=evening_out,
    uneven=uneven,
    split_batches=splitting_batches,
    dispatched=dispatching,
    streams=streams,
    skipping=skipping,
    shuffled=shuffling,
)
