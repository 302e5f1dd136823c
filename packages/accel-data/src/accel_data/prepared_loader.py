"""The base of loaders that `prepare_data_loader` returns: they count epochs and can resume one in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_data.adapter import DataLoaderAdapter, DataLoaderStateMixin, copied_arguments
from accel_data.epoch_order import EpochOrder
from accel_data.reading import ReadAhead
from accel_data.samplers import SkipBatchSampler, batch_sampler_of, index_sampler, innermost, without_first
from accel_data.torchdata_state import call_before_reading
from accel_ops.random import restore_rng_state
from accel_state.gradient_state import GradientState

OF_BATCH = ("end_of_dataloader", "remainder", "num_real_samples")
"""The attributes of a loader that belong to its current batch."""


@dataclass(eq=False, slots=True)
class EpochStart:
    """Where the next iteration of a loader starts.

    Attributes:
        rest_of: The loader from which `skip_first_batches` made this one, to read the rest of its epoch.
        continues: Whether the epoch began before: then starting leaves random numbers where they were, as continuing
            it would.
        is_mid_epoch: Whether the last iteration that was started began after the first batches of an epoch.
        num_skipped: The number of batches of the epoch that this loader leaves out.
    """

    rest_of: PreparedLoader | None = None
    continues: bool = False
    is_mid_epoch: bool = False
    num_skipped: int = 0


class PreparedLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """Base of the prepared loaders; a subclass defines how its processes synchronize and how it reads an epoch.

    Args:
        dataset: As for `torch.utils.data.DataLoader`.
        drop_last (`bool`): Whether the remainder of the dataset is left out.
        non_blocking (`bool`, *optional*): Whether the host goes on before a batch is copied to the device; when None, for
            batches in pinned memory.
        skip_batches (`int`): The number of batches of each iteration that are read and not yielded.
        iteration (`int`): The epoch of the next iteration.
        use_stateful_dataloader (`bool`): Read through torchdata's `StatefulDataLoader`.
        loader_arguments: For `torch.utils.data.DataLoader`.

    Attributes:
        epoch_order: The random states that the order of the current epoch was drawn from.
        epoch_start: Where the next iteration begins.
        sequence_shard: Called with each batch before it is yielded, for processes that hold shards of its sequences;
            None for full sequences.
    """

    iteration: int
    epoch_order: EpochOrder
    epoch_start: EpochStart
    num_real_samples: int | None = None
    """The number of samples of the current batch that are not padding; None for all."""
    after_batch: Callable[[], None] | None = None
    """Called whenever the program has done with a batch and asks for the next one."""
    sequence_shard: Callable[[Any], Any] | None = None
    """Takes this rank's shard of the sequences of a batch; `_batches` calls it while batches are in CPU memory."""

    def __init__(
        self,
        dataset: Any,
        *,
        drop_last: bool,
        non_blocking: bool | None,
        skip_batches: int,
        iteration: int,
        use_stateful_dataloader: bool,
        loader_arguments: dict[str, Any],
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **loader_arguments)
        self._drop_last = drop_last
        self._non_blocking = non_blocking
        self.skip_batches = skip_batches
        self.iteration = iteration
        self.gradient_state = GradientState()
        self.epoch_order = EpochOrder()
        self.epoch_start = EpochStart()
        self._source: Any = None
        self._reading: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        order, start = self.epoch_order, self.epoch_start
        resumption, skipped = order.resumption, self._batches_to_skip()
        start.is_mid_epoch = self._consume_position() or start.rest_of is not None or skipped > 0
        is_restored = start.is_mid_epoch and order.is_restored and self.iteration == order.epoch
        restore_rng = self._begin_order(is_restored)
        self.set_epoch(self.iteration)
        outer = self._outer_batch()
        self.begin()
        order.batches = start.num_skipped + skipped
        order.workers.begin(
            self.base_dataloader,
            continues_after=order.batches if is_restored else None,
            has_position=self.use_stateful_dataloader,
        )
        try:
            with self._without_first(skipped):
                batches = self._counted(self._batches(restore_rng))
                yield from resumption.follow(batches, self, skipped) if resumption and skipped else batches
        except BaseException:
            order.batches = None
            self.end()
            self.gradient_state._leave_dataloader(self)
            vars(self).update(outer)
            raise
        self.end()
        vars(self).update(outer)
        order.finish()
        self.iteration += 1
        loader = start.rest_of if is_restored else None
        while loader is not None:  # so that its next epoch is the one after this, too
            loader.iteration = max(loader.iteration, self.iteration)
            loader = loader.epoch_start.rest_of

    def _outer_batch(self) -> dict[str, Any]:
        """What is said of the current batch of an outer loop over this loader; empty outside of one."""
        is_iterated = any(loader is self for loader in self.gradient_state.dataloader_references)
        return {name: getattr(self, name) for name in OF_BATCH} if is_iterated else {}

    def _batches_to_skip(self) -> int:
        """How many batches of this epoch a loaded checkpoint has seen; 0 if it was not saved within this epoch."""
        order = self.epoch_order
        resumption, order.resumption = order.resumption, None
        if resumption is None or not order.is_restored or self.iteration != order.epoch:
            return 0
        return resumption.batches_to_skip(self)

    @contextmanager
    def _without_first(self, num_batches: int) -> Iterator[None]:
        """A context in which `source` yields the epoch without its first batches."""
        if num_batches and isinstance(self.dataset, IterableDataset):
            self.skip_batches += num_batches
            try:
                yield
            finally:
                self.skip_batches -= num_batches
            return
        if num_batches:
            _, order = without_first(self, num_batches * self.reads_per_batch)
            self._source = DataLoader(self.dataset, **copied_arguments(self), **order)
        try:
            yield
        finally:
            self._source = None

    @property
    def source(self) -> Any:
        """What batches are read from: the wrapped loader, or one of the rest of a continued epoch."""
        return self.base_dataloader if self._source is None else self._source

    def _opened(self) -> Iterator[Any]:
        """The batches of `source`, noting the random states of workers that read them."""
        source, has_position = self.source, self.use_stateful_dataloader
        if self.num_workers:
            return self.epoch_order.workers.read(source, has_position=has_position)
        batches = iter(source)
        if has_position and self._reading:
            call_before_reading(batches, self._restore_reading)
        return batches

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        order = self.epoch_order
        for batch in batches:
            order.batches = (order.batches or 0) + 1
            yield batch
            if self.after_batch is not None:
                self.after_batch()

    def _reader(self, batches: Iterator[Any]) -> ReadAhead:
        """Read an epoch that was begun; where it continues another, its first batch as that one would have."""
        sampler = None if isinstance(self.dataset, IterableDataset) else batch_sampler_of(self.source)
        if self._reading and isinstance(sampler, SkipBatchSampler):
            sampler.before_first = self._restore_reading
        return ReadAhead(batches, self.epoch_order, draws_here=self.num_workers == 0)

    def _restore_reading(self) -> None:
        """Restore the random states from which the first batch of a continued epoch is read."""
        restore_rng_state(self._reading)

    def _begin_order(self, is_restored: bool) -> Callable[[], None] | None:
        """Set the random generators to the states from which the order of the epoch is drawn.

        Returns:
            A function that sets this process's random states, to be called once the order is drawn; None for nothing to set.
        """
        restore_rng: Callable[[], None] | None = None
        self._reading = self.epoch_order.reading if is_restored else {}
        self.epoch_order.reading = {}
        if is_restored:
            restore_rng = self.epoch_order.rewind(self).restore
        elif self.epoch_start.continues:
            restore_rng = partial(torch.set_rng_state, torch.get_rng_state())
        restore_own = self._synchronize()
        if not is_restored:
            self.epoch_order.begin(self)
        return restore_rng or restore_own

    def _synchronize(self) -> Callable[[], None] | None:
        """Synchronize the random generators of all processes.

        Returns:
            A function that restores this process's own random states, to be called once the order is drawn; None where
            they did not change.
        """
        raise NotImplementedError

    def _batches(self, restore_rng: Callable[[], None] | None) -> Iterator[Any]:
        """Read the epoch.

        Args:
            restore_rng: Restores random states; to be called once the first batch to yield was read, before the next
                one is.
        """
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, for samplers and datasets that shuffle by it."""
        self.iteration = epoch
        batches: Any = batch_sampler_of(self)
        receivers: list[Any] = [getattr(innermost(batches), "sampler", None)]
        # a program that skips in a new process, where epochs are counted from 0 again, may have set its batch sampler's itself
        if epoch > 0 or not isinstance(batches, SkipBatchSampler):
            receivers.insert(0, batches)
        for receiver in receivers:
            if hasattr(receiver, "set_epoch"):
                receiver.set_epoch(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def reads_per_batch(self) -> int:
        """How many batches of the wrapped loader make one of this loader's."""
        return 1

    @property
    def total_dataset_length(self) -> int:
        """Samples over all processes."""
        dataset: Any = self.dataset
        length: int = dataset.total_length if hasattr(dataset, "total_length") else len(dataset)
        return length

    def get_sampler(self) -> Any:
        """The sampler of single indices."""
        return index_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler of single indices."""
        innermost(batch_sampler_of(self)).sampler = sampler
