"""Streams, of which each process reads its shard: as every process reads all of it, or sharded at its source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch.utils.data import IterableDataset

from accel_ops.collectives.tensors import gather
from accel_state.public_names import known_as


@known_as("accelerate.data_loader.IterableDatasetShard")
class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process, out of an iterable dataset that each process reads from the start.

    Of every global batch of `num_processes * batch_size` samples (or of `batch_size`, with `split_batches`) each
    process yields its consecutive shard. The last one is padded with the first samples, unless `drop_last` leaves it out.

    Args:
        dataset (`torch.utils.data.IterableDataset`): The stream; must be the same on all processes.
        batch_size (`int`): The batch size of each process, or of all together with `split_batches`.
        drop_last (`bool`): Leave the last global batch out when it is not full.
        num_processes (`int`): The number of processes.
        process_index (`int`): The index of this process.
        split_batches (`bool`): Whether `batch_size` is that of all processes together.

    Raises:
        ValueError: When `split_batches` cannot split the batch evenly.
    """

    dataset: Any
    batch_size: int
    drop_last: bool
    num_processes: int
    process_index: int
    split_batches: bool
    epoch: int
    marks_padding: bool = False
    """Whether samples that come again as padding are wrapped in `Padding`, for `CountingCollate`."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes != 0:
            raise ValueError(
                f"split_batches=True cannot split batches of {batch_size} evenly over {num_processes} processes: "
                f"choose a batch size that is a multiple of {num_processes}."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0
        self.last_batch_size = -1
        """Samples of the last global batch without padding, once the stream has ended; 0 for a full one."""

    @property
    def total_length(self) -> int:
        """Samples over all processes."""
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the stream, which changes its shuffling."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        num_full, left = divmod(len(self.dataset), self.batch_size * self.num_processes)
        return (num_full + (left > 0 and not self.drop_last)) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if not hasattr(self.dataset, "set_epoch") and isinstance(generator, torch.Generator):
            generator.manual_seed(self.epoch)
        global_size = self.batch_size if self.split_batches else self.batch_size * self.num_processes
        size = global_size // self.num_processes
        local_slice = slice(size * self.process_index, size * (self.process_index + 1))
        first: list[Any] | None = None
        current: list[Any] = []
        self.last_batch_size = -1
        for sample in self.dataset:
            current.append(sample)
            if len(current) == global_size:
                yield from current[local_slice]
                first = current if first is None else first
                current = []
        self.last_batch_size = len(current)
        if current and not self.drop_last:
            first = list(current) if first is None else first
            padding: list[Any] = list(map(Padding, first)) if self.marks_padding else first
            while len(current) < global_size:
                current += padding
            yield from current[local_slice]


@dataclass(frozen=True, slots=True)
class Padding:
    """A sample that comes again, to make a batch full."""

    sample: Any


class CountingCollate:
    """Collates the samples of a shard that marks its padding, and says how many are real: a worker alone knows where its stream ends.

    Args:
        collate: The loader's own function.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> tuple[Any, int | None]:
        """The batch, and how many of its samples are real; None for all."""
        if isinstance(samples, Padding):  # a batch that the stream has made itself
            return self.collate(samples.sample), 0
        if not (isinstance(samples, list) and samples and isinstance(samples[-1], Padding)):
            return self.collate(samples), None
        real = [sample for sample in samples if not isinstance(sample, Padding)]
        return self.collate(real + [sample.sample for sample in samples[len(real) :]]), len(real)


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
