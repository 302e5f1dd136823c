"""Samplers: finding a loader's, one shuffled by seed and epoch alone, shards, rests, and indices read ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler

from accel_data.order_check import OrderCheck
from accel_ops.random import common_seed
from accel_state.public_names import known_as


@known_as("accelerate.data_loader.SeedableRandomSampler")
class SeedableRandomSampler(RandomSampler):
    """A random sampler that shuffles by seed plus epoch: in the same order on all processes, and after a restart.

    Args:
        args: For `RandomSampler`.
        data_seed (`int`, *optional*): The seed; torch's initial seed when None, without what
            `set_seed(device_specific=True)` added for this process.
        kwargs: For `RandomSampler`.
    """

    initial_seed: int
    epoch: int
    generator: torch.Generator | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        data_seed = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        self.initial_seed = data_seed if data_seed is not None else common_seed()
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator(device=torch.get_default_device())
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of that epoch for the next iteration."""
        self.epoch = epoch


@known_as("accelerate.data_loader.SkipBatchSampler")
class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches; their samples are never read.

    Args:
        batch_sampler: Yields lists of indices.
        skip_batches (`int`): The number of batches to skip.
    """

    num_kept = 0  # of the class, because one that accelerate 1.15 has pickled has none

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.kept: list[list[int]] = []

    def keep_first(self, num_batches: int) -> None:
        """Keep the first batches of every epoch in `kept`, skipped or not: the last global batch is padded with them."""
        self.num_kept = num_batches

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # while a copy is being restored
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __iter__(self) -> Iterator[list[int]]:
        self.kept = []
        for index, batch in enumerate(self.batch_sampler):
            if index < self.num_kept:
                self.kept.append(list(batch))
            if index >= self.skip_batches:
                yield batch

    @property
    def total_length(self) -> int:
        """The number of batches, including the skipped ones."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


def get_sampler(dataloader: Any) -> Any:
    """The sampler of single indices behind a loader; None for an iterable dataset."""
    batches = batch_sampler_of(dataloader)
    return getattr(batches, "sampler", None)


def batch_sampler_of(dataloader: Any) -> Any:
    """The object that yields lists of indices: the batch sampler, or a sampler that does so itself."""
    return dataloader.sampler if isinstance(dataloader.sampler, BatchSampler) else dataloader.batch_sampler


def innermost(sampler: Any) -> Any:
    """The user's own batch sampler inside shards and skips."""
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return sampler


def index_sampler(dataloader: Any) -> Any:
    """The user's own sampler of single indices, inside shards and skips; None where there is none."""
    return getattr(innermost(batch_sampler_of(dataloader)), "sampler", None) or get_sampler(dataloader)


def without_first(dataloader: Any, num_batches: int) -> tuple[SkipBatchSampler, dict[str, Any]]:
    """The order of a loader without its first batches.

    Args:
        dataloader: A loader of an indexed dataset.
        num_batches: How many batches of its batch sampler to leave out; samples, where it has none.

    Returns:
        The sampler that leaves them out, and the arguments of a `DataLoader` that reads by it.
    """
    if isinstance(dataloader.sampler, BatchSampler) or dataloader.batch_sampler is None:
        skipping = SkipBatchSampler(dataloader.sampler, skip_batches=num_batches)
        return skipping, {"sampler": skipping, "batch_size": dataloader.batch_size}
    skipping = SkipBatchSampler(dataloader.batch_sampler, skip_batches=num_batches)
    return skipping, {"batch_sampler": skipping}


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
        return self.batch_sampler if check is None else check.recording(self.batch_sampler, num_batches)

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


class IndicesAhead:
    """Iterates a sampler ahead of the loader that reads by it. No sample is read, and no random number drawn, before its time.

    Args:
        sampler: The sampler or batch sampler of a loader.
        per_batch (`int`): How many of its items make one batch of the prepared loader.
        drop_last (`bool`): Whether fewer than these are left out at the end.

    Attributes:
        end: Of the iteration that began last; None before one did.
        order_drawn: Called once, when the next iteration has drawn its first indices and before their samples are read.
        empty_first: So many empty batches come first in the next iteration, and are not counted: workers take turns, and
            these pass to the next one.
        order_check: Compares the items with those of other processes, which read the same.
    """

    def __init__(self, sampler: Any, per_batch: int = 1, drop_last: bool = False) -> None:
        self.sampler = sampler
        self.per_batch = per_batch
        self.drop_last = drop_last
        self.end: End | None = None
        self.order_drawn: Callable[[], object] | None = None
        self.empty_first = 0
        self.order_check: OrderCheck | None = None

    def __iter__(self) -> Iterator[Any]:
        self.end = End()
        return self._items(self.end)

    def __len__(self) -> int:
        return len(self.sampler)

    def _items(self, end: End) -> Iterator[Any]:
        check = self.order_check
        following = map(_copied, self.sampler if check is None else check.recording(self.sampler, 1))
        ahead = deque(islice(following, self.per_batch))
        order_drawn, self.order_drawn = self.order_drawn, None
        if order_drawn is not None:
            order_drawn()
        empty, self.empty_first = self.empty_first, 0
        for _ in range(empty):
            yield []
        num_items = len(ahead)
        for item in following:
            num_items += 1
            ahead.append(item)
            yield ahead.popleft()
        full, left = divmod(num_items, self.per_batch)
        end.num_batches = full + (left > 0 and not self.drop_last)
        yield from ahead

    @contextmanager
    def installed(self, loader: Any) -> Iterator[None]:
        """A context in which iterating a `torch.utils.data.DataLoader` begins with these indices."""
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        vars(loader)[name] = (
            self  # torch refuses to set the attribute, because its own iterators keep what they began with
        )
        try:
            yield
        finally:
            vars(loader)[name] = self.sampler


def _copied(item: Any) -> Any:
    """An item that stays as it is when the next one is drawn: samplers may yield one list again and again, with other indices."""
    if type(item) is list:
        return item[:]
    return item.clone() if isinstance(item, torch.Tensor) else copy(item)


class End:
    """Where an iteration ends.

    Attributes:
        num_batches: How many batches of the prepared loader it has; None until that is known, when its last one is asked for
            at the latest.
    """

    num_batches: int | None = None
