"""Sharding the batches of a batch sampler."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Any

from torch.utils.data import BatchSampler

from accel_data.order_check import OrderCheck
from accel_state.public_names import known_as


@known_as("accelerate.data_loader.BatchSamplerShard")
class BatchSamplerShard(BatchSampler):
    """The batches of one process, out of those of a batch sampler.

    A global batch is one batch per process; with `split_batches` it is one batch, sliced into a local one per process.
    When the last global batch is not full, and `even_batches` is set, it is padded with the first samples, so that all
    processes get equally many batches of equal size; otherwise processes may get less. Where the sampler has no
    `batch_size`, because its batches have different sizes, the last global batch is padded with the first batches as
    they are. With `drop_last` of the sampler, a global batch that is not full is left out.

    Args:
        batch_sampler (`torch.utils.data.Sampler`): Yields lists of indices.
        num_processes (`int`): The number of processes.
        process_index (`int`): The index of this process.
        split_batches (`bool`): Slice each batch instead of yielding every `num_processes`-th one.
        even_batches (`bool`): Pad the last global batch if it is not full.

    Raises:
        ValueError: With `split_batches`, when a batch cannot be sliced evenly or its size is unknown.
    """

    batch_sampler: Any
    batch_size: Any  # None where the sampler has none
    num_processes: int
    process_index: int
    split_batches: bool
    even_batches: bool
    drop_last: bool
    was_read: bool = False
    """Whether anything has iterated it."""
    order_check: OrderCheck | None = None
    """Compares what is sharded with what other processes shard."""

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches and (self.batch_size is None or self.batch_size % num_processes != 0):
            size = "unknown size (the sampler has no batch_size)" if self.batch_size is None else str(self.batch_size)
            raise ValueError(
                f"split_batches=True cannot split batches of {size} evenly over {num_processes} processes. Choose a batch "
                f"size that is a multiple of {num_processes}."
            )

    @property
    def total_length(self) -> int:
        """The number of batches of all processes together."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        if self.split_batches:
            return len(self.batch_sampler)
        num_full, left = divmod(len(self.batch_sampler), self.num_processes)
        if left == 0 or self.drop_last:
            return num_full
        return num_full + 1 if self.even_batches or self.process_index < left else num_full

    def __iter__(self) -> Iterator[list[int]]:
        self.was_read = True
        return self._slices() if self.split_batches else self._own_batches()

    def _compared(self, num_batches: int) -> Any:
        """The batches to shard; the first of them are compared with those of other processes."""
        check = self.order_check
        return self.batch_sampler if check is None else check.noting(self.batch_sampler, num_batches)

    def _slices(self) -> Iterator[list[int]]:
        """This process's slice of every batch."""
        assert self.batch_size is not None
        width = self.batch_size // self.num_processes
        local_slice = slice(width * self.process_index, width * (self.process_index + 1))
        first: list[int] | None = None
        for batch in self._compared(1):
            first = list(batch) if first is None else first
            if len(batch) < self.batch_size:
                if self.drop_last:
                    continue
                if self.even_batches:
                    batch = _padded(list(batch), self.batch_size, cycle(first))
            local_batch = batch[local_slice]
            if local_batch:
                yield local_batch

    def _own_batches(self) -> Iterator[list[int]]:
        """This process's batch of every global batch."""
        first: list[list[int]] = []  # the batches of the first global batch
        pending: list[list[int]] = []  # the batches of a global batch, until all of them are known
        for batch in self._compared(self.num_processes):
            if len(pending) == self.num_processes:  # its last batch was short, but not the last of all
                yield pending[self.process_index]
                pending = []
            if len(first) < self.num_processes and not self.drop_last:
                first.append(list(batch))
            pending.append(batch)
            if len(pending) == self.num_processes and len(batch) == (self.batch_size or len(batch)):
                yield pending[self.process_index]
                pending = []
        if self.drop_last or not any(first) or not pending:
            return
        if self.even_batches:
            yield self._pad_global_batch(pending, first)
        elif self.process_index < len(pending):
            yield pending[self.process_index]

    def _pad_global_batch(self, pending: list[list[int]], first: list[list[int]]) -> list[int]:
        if self.batch_size is None:
            return [*pending, *islice(cycle(first), self.num_processes)][self.process_index]
        padding = cycle(chain.from_iterable(first))
        for position in range(self.process_index + 1):
            batch = list(pending[position]) if position < len(pending) else []
            batch = _padded(batch, self.batch_size, padding)
        return batch


def _padded(batch: list[int], size: int, padding: Iterator[int]) -> list[int]:
    return batch + [next(padding) for _ in range(size - len(batch))]
