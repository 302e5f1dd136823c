"""A loader with which each process reads its own shard of the dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from accel_data.device_copies import make_copies
from accel_data.iterable_shard import IterableDatasetShard
from accel_data.prepared_loader import PreparedLoader
from accel_data.samplers import batch_sampler_of
from accel_data.split_stream import SplitStream, UnevenBatches
from accel_ops.random import synchronize_rng_states
from accel_state.public_names import known_as
from accel_state.supervision import report_progress


@known_as("accelerate.data_loader.DataLoaderShard")
class DataLoaderShard(PreparedLoader):
    """Reads this process's shard, moves batches to the device, and marks the last batch before yielding it.

    Args:
        dataset: As for `torch.utils.data.DataLoader`.
        device (`torch.device`, *optional*): Device of batches; they are not moved when None.
        rng_types (list of `str` or `RNGType`, *optional*): Random generators to synchronize when an iteration starts.
        synchronized_generator (`torch.Generator`, *optional*): The generator for the type "generator".
        skip_batches (`int`): The number of batches that are read and not yielded.
        use_stateful_dataloader (`bool`): Read through torchdata's `StatefulDataLoader`.
        torch_device_mesh (*optional*): Not used here.
        iteration (`int`): The epoch of the next iteration.
        kwargs: For `torch.utils.data.DataLoader`.
    """

    draws_together: bool = False
    """Whether the sampler draws from torch's own generator, whose state must then be the same on all processes."""

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool | None = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            drop_last=_drop_last,
            non_blocking=_non_blocking,
            skip_batches=skip_batches,
            iteration=iteration,
            use_stateful_dataloader=use_stateful_dataloader,
            loader_arguments=kwargs,
        )
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator

    def _synchronize(self) -> Callable[[], None] | None:
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        if not self.draws_together:
            return None
        own = torch.get_rng_state()
        synchronize_rng_states(["torch"])
        return None if torch.equal(own, torch.get_rng_state()) else partial(torch.set_rng_state, own)

    def _batches(self, restore_rng: Callable[[], None] | None) -> Iterator[Any]:
        copies = make_copies(self.device, self._non_blocking)
        uneven = isinstance(self.dataset, SplitStream)
        batches: Iterator[Any] = self._opened()
        if uneven:
            batches = UnevenBatches(batches)
        reader, nothing = self._reader(batches), object()
        current: Any = reader.next(nothing)
        for left in range(self.skip_batches if current is not nothing else 0, 0, -1):
            report_progress()
            if left == 1:
                self._restore_reading()
            current = reader.next(nothing)
            if current is nothing:
                self._end_reached()
                break
        if restore_rng is not None:
            restore_rng()
        started = None if current is nothing else copies.start(self._sharded(current, uneven))
        while current is not nothing:
            report_progress()
            self._update_state_dict(finished=False)
            # A dataset that is read here may write to memory of the batch before; what torch has pinned is a copy of that.
            if self.num_workers == 0 and not self.pin_memory:
                copies.settle()
            current = reader.next(nothing)  # one batch ahead, to mark the last one and to copy it meanwhile
            ahead = None if current is nothing else copies.start(self._sharded(current, uneven))
            if current is nothing:
                self._end_reached()
            batch = copies.finish(started)
            if uneven:
                batch, self.num_real_samples = batch
            yield batch
            started = ahead

    def _sharded(self, current: Any, uneven: bool) -> Any:
        """This rank's shard of the sequences of a batch: less to move, and reading it does not wait for the device."""
        if self.sequence_shard is None:
            return current
        return (self.sequence_shard(current[0]), *current[1:]) if uneven else self.sequence_shard(current)

    def _end_reached(self) -> None:
        self.end_of_dataloader = self.epoch_order.at_end = True
        self._update_state_dict(finished=True)
        if self.remainder == -1 and not self._drop_last:  # a stream's length is known now that it has ended
            self.remainder = getattr(self.dataset, "last_batch_size", -1)

    @property
    def total_batch_size(self) -> int:
        """Samples of one batch over all processes."""
        is_iterable = isinstance(self.dataset, (IterableDatasetShard, SplitStream))
        batches: Any = self.dataset if is_iterable else batch_sampler_of(self)
        if getattr(batches, "split_batches", False):
            return batches.batch_size
        return batches.batch_size * getattr(batches, "num_processes", 1)
