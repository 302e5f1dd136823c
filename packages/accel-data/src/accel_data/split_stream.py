"""Iterable datasets that can be sharded at their source, so that each sample is read once; shards may differ in length."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import torch
from torch.utils.data import IterableDataset

from accel_ops.collectives.tensors import gather


def find_split(dataset: Any, index: int, count: int) -> Any:
    """The shard of a stream that one process reads, if the stream says how it is sharded at its source.

    That says one with a method `split_for_process(index, count)`, which returns the shard of process `index` of `count`. Streams with
    any other method that shards them need not: those of `datasets` shard the source of their `take` or `map`, which then choose or
    number other samples than in one process.

    Args:
        dataset: The stream.
        index: The index of the process.
        count: The number of processes.

    Returns:
        The shard, or None when the stream cannot be sharded at its source.
    """
    return dataset.split_for_process(index, count) if hasattr(dataset, "split_for_process") else None


class SplitStream(IterableDataset[Any]):
    """Marks a stream of which this process reads a shard of its own; shards may differ in length.

    Args:
        shard: What `find_split` returned.
        batch_size (`int`): The batch size of this process.
        num_processes (`int`): The number of shards of the stream.
    """

    def __init__(self, shard: Any, batch_size: int, num_processes: int) -> None:
        self.dataset = shard
        self.batch_size = batch_size
        self.num_processes = num_processes

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the stream, which changes its shuffling."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


def uneven_batches(batches: Iterator[Any]) -> Iterator[tuple[Any, int | None]]:
    """Batches of this process's shard, and its first batch again while other processes still have batches.

    Before each batch the processes all-gather whether each has one. Yields pairs: the batch, and how many of
    its samples are real: None for all, 0 for a repeated batch, which `gather_for_metrics` leaves out.

    Args:
        batches: This process's batches.
    """
    first: Any = None
    for batch in chain(batches, repeat(None)):
        first = batch if first is None else first
        have, lacking = (
            gather(torch.tensor([[int(batch is not None), int(first is None)]])).view(-1, 2).sum(0).tolist()
        )
        if have == 0:
            return
        if lacking:
            raise ValueError(
                f"{lacking} of the processes got no sample of the sharded stream at all, so they cannot stay in step with "
                "the others. Use fewer processes, or a stream with more shards."
            )
        yield (first, 0) if batch is None else (batch, None)
