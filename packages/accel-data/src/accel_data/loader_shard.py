"""A loader with which each process reads its own shard of the dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler
from typing_extensions import override

from accel_data.device_copies import DeviceCopies, make_copies
from accel_data.order_check import OrderCheck
from accel_data.prepared_loader import OpenEpoch, PreparedLoader, Reading
from accel_data.samplers import BatchSamplerShard, batch_sampler_of, innermost
from accel_data.streams import IterableDatasetShard, SplitStream, uneven_batches
from accel_ops.random import synchronize_rng_states
from accel_state.public_names import known_as


@known_as("accelerate.data_loader.DataLoaderShard")
class DataLoaderShard(PreparedLoader):
    """Reads this process's shard, moves batches to the device, and marks the last batch before yielding it.

    Args:
        dataset: As for `torch.utils.data.DataLoader`.
        device (`torch.device`, *optional*): Device of batches; they are not moved when None.
        rng_types (list of `str` or `RNGType`, *optional*): Random generators to synchronize when an iteration starts.
        synchronized_generator (`torch.Generator`, *optional*): The generator for the type "generator".
        skip_batches (`int`): The number of batches that are read and not yielded.
        use_stateful_dataloader (`bool`): Continue by itself an epoch that a checkpoint was saved in.
        torch_device_mesh (*optional*): Not used here.
        iteration (`int`): The epoch of the next iteration.
        kwargs: For `torch.utils.data.DataLoader`.
    """

    draws_together: bool = False
    """Whether the sampler draws from torch's own generator, whose state must then be the same on all processes."""

    num_own_shards: int = 1
    """How many shards there are of an indexed dataset that the program has sharded itself."""

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
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

    @override
    def _rest_with(self, arguments: dict[str, Any]) -> DataLoaderShard:
        rest = DataLoaderShard(
            self.dataset,
            device=self.device,
            rng_types=self.rng_types,
            synchronized_generator=self.synchronized_generator,
            **arguments,
        )
        rest.draws_together, rest.num_own_shards = self.draws_together, self.num_own_shards
        return rest

    @override
    def _synchronize(self) -> Callable[[], object] | None:
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        if not self.draws_together:
            return None
        rng_state = torch.get_rng_state()
        synchronize_rng_states(["torch"])
        return None if torch.equal(rng_state, torch.get_rng_state()) else partial(torch.set_rng_state, rng_state)

    @override
    def _open(self, reading: Reading) -> OpenEpoch:
        copies = make_copies(self.device, self._non_blocking)
        are_counted = isinstance(self.dataset, SplitStream) or getattr(self.dataset, "marks_padding", False)
        # Copies run ahead of the program where workers read: then reading ahead draws no random number here.
        runs_ahead = copies.are_started_early and self.num_workers > 0
        batches, end = self._read(reading, partial(self._copied, copies, are_counted), runs_ahead=runs_ahead)
        return batches, end, partial(self._finish_counted, copies) if are_counted else copies.finish

    def _finish_counted(self, copies: DeviceCopies, counted: tuple[Any, int | None]) -> Any:
        """The batch of a stream, whose number of real samples came with it."""
        batch, self.num_real_samples = counted
        return copies.finish(batch)

    @override
    def _grouped(self, batches: Iterator[Any]) -> Iterator[Any]:
        return uneven_batches(batches) if isinstance(self.dataset, SplitStream) else batches

    def _copied(self, copies: DeviceCopies, are_counted: bool, batches: Iterator[Any]) -> Iterator[Any]:
        """Batches whose copies to the device are started."""
        shard = self.sequence_shard  # less to move, and taking it does not wait for the device
        if shard is None and not copies.are_started_early:
            return batches
        # A dataset that is read here may write to memory of the batch before; what torch has pinned is a copy of that.
        settle = copies.settle if self.num_workers == 0 and not self.pin_memory else None
        return started_copies(batches, copies, shard, are_counted, settle)

    def check_order(self, check: OrderCheck) -> None:
        """Compare the order of the first epoch with that of other processes."""
        shard = batch_sampler_of(self)
        if isinstance(shard, BatchSamplerShard):
            shard.order_check = check
        else:  # processes that read the same
            self.order_check = check

    @override
    def begin(self) -> None:
        """Start an iteration."""
        super().begin()
        self.num_real_samples = None
        if self.num_own_shards > 1:
            self.remainder = 0  # what is padding is known to the program alone, or to its sampler

    @override
    def _end_reached(self, item: Any) -> None:
        super()._end_reached(item)
        if self.num_own_shards > 1:
            self.num_real_samples = _num_real_in_last(innermost(batch_sampler_of(self)))
        if getattr(self.dataset, "marks_padding", False) and (self.num_workers > 1 or self.batch_size is None):
            self.remainder = 0  # each worker has an end of its own, and batches say what of them is padding
        elif self.remainder == -1 and not self._drop_last:  # a stream's length is known now that it has ended
            self.remainder = getattr(self.dataset, "last_batch_size", -1)

    @property
    def total_batch_size(self) -> int:
        """Samples of one batch over all processes."""
        is_iterable = isinstance(self.dataset, (IterableDatasetShard, SplitStream))
        batches: Any = self.dataset if is_iterable else batch_sampler_of(self)
        if getattr(batches, "split_batches", False):
            return batches.batch_size
        return batches.batch_size * max(getattr(batches, "num_processes", 1), self.num_own_shards)


def _num_real_in_last(batches: Any) -> int | None:
    """How many samples of the last batch are not padding of torch's `DistributedSampler`; None where no such sampler pads."""
    sampler = getattr(batches, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or type(batches) is not BatchSampler or batches.drop_last:
        return None
    dataset: Any = sampler.dataset
    num_padded = len(sampler) - len(range(sampler.rank, len(dataset), sampler.num_replicas))
    return (len(sampler) % batches.batch_size or batches.batch_size) - num_padded if num_padded > 0 else None


def started_copies(
    batches: Iterator[Any],
    copies: DeviceCopies,
    shard: Callable[[Any], Any] | None,
    are_counted: bool,
    settle: Callable[[], None] | None,
) -> Iterator[Any]:
    """Start to copy each batch as soon as it is read.

    Args:
        batches: The batches; each of a stream with the number of its real samples.
        copies: Copies them.
        shard: Takes this rank's shard of the sequences of a batch first.
        are_counted: Whether it is such a stream.
        settle: To be called before the next batch is read.
    """
    for batch in batches:
        rows, *of_batch = batch if are_counted else (batch,)
        started = copies.start(rows if shard is None else shard(rows))
        yield (started, *of_batch) if are_counted else started
        if settle is not None:
            settle()
