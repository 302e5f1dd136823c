"""Batches for a process that computes on several devices at once: one for each of them, joined."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_data.adapter import copied_arguments
from accel_data.samplers import batch_sampler_of
from accel_data.streams import IterableDatasetShard


class GlobalBatches(BatchSampler):
    """Joins consecutive batches of a batch sampler, and pads the last one, so that all have equal sizes.

    Each has the samples that as many processes would read together.

    Args:
        batch_sampler: Yields lists of indices.
        num_joined: How many of its batches make one.
        even_batches: Pad the last one with the first samples; needs a sampler with `batch_size`.
    """

    batch_sampler: Any
    batch_size: Any  # None where the sampler has none
    drop_last: bool

    def __init__(self, batch_sampler: Any, num_joined: int, even_batches: bool = True) -> None:
        self.batch_sampler = batch_sampler
        self.num_joined = num_joined
        self.even_batches = even_batches
        size = getattr(batch_sampler, "batch_size", None)
        self.batch_size = None if size is None else size * num_joined
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    @property
    def sampler(self) -> Any:  # type: ignore[override] # looked up in the batch sampler, where it may be replaced
        """The sampler of single indices."""
        return getattr(self.batch_sampler, "sampler", None)

    def __len__(self) -> int:
        num_full, left = divmod(len(self.batch_sampler), self.num_joined)
        return num_full + (left > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        first: list[int] = []
        batches = iter(self.batch_sampler)
        while joined := list(islice(batches, self.num_joined)):
            if len(joined) < self.num_joined and self.drop_last:
                return
            indices = list(chain.from_iterable(joined))
            first = first or indices
            if self.even_batches and self.batch_size is not None:
                indices += islice(cycle(first), self.batch_size - len(indices))
            yield indices


def with_global_batches(dataloader: DataLoader[Any], num_joined: int, even_batches: bool) -> DataLoader[Any]:
    """A loader of the same dataset that yields `GlobalBatches`.

    Args:
        dataloader: As for one process.
        num_joined: How many batches make one.
        even_batches: Pad the last one, so that all have equal sizes.
    """
    arguments = copied_arguments(dataloader)
    size = dataloader.batch_size
    if isinstance(dataloader.dataset, IterableDataset):
        if size is None:
            return dataloader
        dataset: Any = dataloader.dataset
        if even_batches:
            dataset = IterableDatasetShard(dataset, batch_size=size * num_joined, drop_last=dataloader.drop_last)
        return DataLoader(dataset, batch_size=size * num_joined, drop_last=dataloader.drop_last, **arguments)
    batches = batch_sampler_of(dataloader)
    if batches is None:
        return dataloader
    joined = GlobalBatches(batches, num_joined, even_batches)
    if isinstance(dataloader.sampler, BatchSampler):
        return DataLoader(dataloader.dataset, batch_size=None, sampler=joined, **arguments)
    return DataLoader(dataloader.dataset, batch_sampler=joined, **arguments)
