"""Streams that can be divided where they come from, so that each sample is read once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset


def find_split(dataset: Any, index: int, count: int) -> Any:
    """The part of a stream that one process reads, if the stream can be divided at its source.

    Three kinds can. One with a method `split_for_process(index, count)`, which returns the part of process `index` of
    `count`. One made of at least `count` shards, a multiple of it, with `shard(num_shards, index)` and `num_shards`
    (or `n_shards`), such as `datasets.IterableDataset`. And one that says `is_split_for_process = True`: it yields
    each process's own part already.

    Args:
        dataset: The stream.
        index: Which process.
        count: Over how many processes.

    Returns:
        The part, or None when the stream cannot be divided.
    """
    if getattr(dataset, "is_split_for_process", False):
        return dataset
    if hasattr(dataset, "split_for_process"):
        return dataset.split_for_process(index, count)
    num_shards = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", None)
    if hasattr(dataset, "shard") and isinstance(num_shards, int) and num_shards and num_shards % count == 0:
        return dataset.shard(num_shards=count, index=index)
    return None


class SplitStream(IterableDataset[Any]):
    """Marks a stream of which this process reads a part of its own; parts may differ in length.

    Args:
        part: What `find_split` returned.
        batch_size (`int`): Of this process.
        num_processes (`int`): Over how many processes the stream was divided.
    """

    def __init__(self, part: Any, batch_size: int, num_processes: int) -> None:
        self.dataset = part
        self.batch_size = batch_size
        self.num_processes = num_processes

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch it is in, so that it shuffles anew."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)
