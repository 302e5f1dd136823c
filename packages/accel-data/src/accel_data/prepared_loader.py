"""The base of loaders that `prepare_data_loader` returns: they count epochs, and know where in one they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from accel_data.adapter import DataLoaderAdapter, DataLoaderStateMixin, copied_arguments
from accel_data.epoch import Epoch
from accel_data.order_check import OrderCheck
from accel_data.program_loaders import check_shard_is_read, is_derived, reads_otherwise
from accel_data.samplers import (
    End,
    IndicesAhead,
    SkipBatchSampler,
    batch_sampler_of,
    index_sampler,
    innermost,
    without_first,
)
from accel_data.sequence_shard import SequenceShard
from accel_data.torchdata_state import call_before_reading
from accel_ops.random import capture_cpu_rng_state, restore_rng_state
from accel_state.gradient_state import GradientState
from accel_state.processes import PartialState
from accel_state.supervision import report_progress
from accel_state.warning import warn_user

OF_BATCH = ("end_of_dataloader", "remainder", "num_real_samples")
"""The attributes of a loader that belong to its current batch."""
NOTHING = object()


@dataclass(frozen=True, slots=True)
class Reading:
    """How an iteration reads its batches.

    Attributes:
        source: The loader that it reads.
        skipped: How many batches of a stream are read and dropped first.
        is_mid_epoch: Whether it begins after the first batches of the epoch.
        states: The random states from which a stream's first batch after the dropped ones is read; empty for the current ones.
        order_drawn: Sets this process's random states, to be called once the order is drawn; None for nothing to set.
    """

    source: Any
    skipped: int
    is_mid_epoch: bool
    states: dict[str, Any]
    order_drawn: Callable[[], object] | None


OpenEpoch = tuple[Iterator[Any], End, Callable[[Any], Any]]
"""An epoch that has begun to be read: an item for each batch, where they end, and what makes a batch of an item."""


class PreparedLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """Base of the prepared loaders; a subclass defines how its processes synchronize and how it reads an epoch.

    Args:
        dataset: As for `torch.utils.data.DataLoader`.
        drop_last (`bool`): Whether the remainder of the dataset is left out.
        non_blocking (`bool`): Whether the host goes on before a batch is copied to the device also where it is not in pinned memory.
        skip_batches (`int`): The number of batches of each iteration that are read and not yielded.
        iteration (`int`): The epoch of the next iteration.
        use_stateful_dataloader (`bool`): Continue by itself an epoch that a checkpoint was saved in.
        loader_arguments: For `torch.utils.data.DataLoader`.

    Attributes:
        epoch: The epoch that is read, or was restored.
        sequence_shard: What shards the sequences of each batch, for processes that hold shards; None for full sequences.
        rest_of: The loader of which `skip_first_batches` made this one, to read the rest of its epoch.
        num_skipped: The number of batches of the epoch that this loader leaves out.
        leaves_random_numbers: Whether starting an iteration leaves random numbers where they were, as going on in an epoch does.
    """

    iteration: int
    epoch: Epoch
    num_real_samples: int | None = None
    """The number of samples of the current batch that are not padding; None for all."""
    after_batch: Callable[[], None] | None = None
    """Called whenever the program has done with a batch and asks for the next one."""
    sequence_shard: SequenceShard | None = None
    """Takes this rank's shard of the sequences of a batch while it is in CPU memory."""
    rest_of: PreparedLoader | None = None
    num_skipped: int = 0
    leaves_random_numbers: bool = False
    order_check: OrderCheck | None = None
    """Compares the order with that of processes that read the same."""
    _indices: IndicesAhead | None = None

    def __init__(
        self,
        dataset: Any,
        *,
        drop_last: bool,
        non_blocking: bool,
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
        self.epoch = Epoch()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        outer, reading = self._outer_batch(), self._start()
        epoch = self.epoch
        try:
            items, end, finish = self._open(reading)
            for number, item in enumerate(items, 1):
                report_progress()
                if number == end.num_batches:
                    self._end_reached(item)
                batch = finish(item)
                if self.sequence_shard is not None:
                    batch = self.sequence_shard.marked(batch)
                epoch.batches = (epoch.batches or 0) + 1
                yield batch
                if self.after_batch is not None:
                    self.after_batch()
        except BaseException:
            self._stop(outer)
            epoch.leave()
            self.gradient_state._leave_dataloader(self)
            raise
        self._stop(outer)
        self._finish_epoch()

    # ---- an epoch -----------------------------------------------------------------------------------------------

    def _outer_batch(self) -> dict[str, Any]:
        """What is said of the current batch of an outer loop over this loader; empty outside of one."""
        is_iterated = any(loader is self for loader in self.gradient_state.dataloader_references)
        return {name: getattr(self, name) for name in OF_BATCH} if is_iterated else {}

    def _start(self) -> Reading:
        """Start the epoch, or the rest of one that a checkpoint was saved in, and set random states to those of its order."""
        epoch = self.epoch
        is_restored = epoch.is_restored and self.iteration == epoch.number
        position, epoch.position = (epoch.position if is_restored else None), None
        is_at_position = self._consume_position()
        num_skipped = 0  # by this iteration; a loader for the rest of an epoch begins later by itself
        num_done = self.num_skipped
        if position is not None and is_at_position:
            num_done += position.batches
        elif position is not None and num_done == 0 and self.use_stateful_dataloader:
            num_done = num_skipped = position.batches_in(self)
        elif position is not None and num_done == 0:
            self._say_how_to_continue(position.batches)
        is_mid_epoch = num_done > 0 or is_at_position
        states, epoch.reading = (epoch.reading if is_restored and is_mid_epoch else {}), {}
        order_drawn = self._start_order(is_restored)
        self.set_epoch(self.iteration)
        self.begin()
        epoch.batches = num_done
        epoch.workers.begin(
            self.base_dataloader,
            continues_after=num_done if is_restored else None,
            at_position=is_at_position if self.reads_with_torchdata else None,
        )
        source = (
            self._source_after(num_skipped) if num_skipped and not self.reads_what_it_skips else self.base_dataloader
        )
        self._reads_base = source is self.base_dataloader
        dropped = self.skip_batches + (num_skipped if self.reads_what_it_skips else 0)
        return Reading(source, dropped, is_mid_epoch, states, order_drawn)

    def _start_order(self, is_restored: bool) -> Callable[[], object] | None:
        """Set the random generators to the states from which the order of the epoch is drawn.

        Returns:
            A function that sets this process's random states, to be called once the order is drawn; None for nothing to set.
        """
        order_drawn: Callable[[], object] | None = None
        if is_restored:
            order_drawn = self.epoch.rewind(self).restore
        elif self.leaves_random_numbers:
            order_drawn = partial(torch.set_rng_state, torch.get_rng_state())
        restore_own = self._synchronize()
        if not is_restored:
            self.epoch.begin(self)
        return order_drawn or restore_own

    def _say_how_to_continue(self, num_batches: int) -> None:
        """Say once what continues an epoch, when a loop begins it again."""
        if PartialState().is_main_process:
            warn_user(
                f"The checkpoint was saved after {num_batches} batches of an epoch, and this loop reads that epoch from its start, in "
                f"the same order. To read its rest, loop over accelerator.skip_first_batches(loader, {num_batches}) in this epoch, or "
                "set DataLoaderConfiguration(use_stateful_dataloader=True). A loop that passes over these batches itself is right as "
                "it is."
            )

    def _source_after(self, num_batches: int) -> DataLoader[Any]:
        """A loader of an indexed dataset, to be read once, without the first batches of the epoch."""
        _, order = without_first(self, num_batches * self.reads_per_batch)
        return DataLoader(self.dataset, **copied_arguments(self), **order)

    def _stop(self, outer: dict[str, Any]) -> None:
        self.end()
        vars(self).update(outer)

    def _finish_epoch(self) -> None:
        self.epoch.finish()
        self.iteration += 1
        loader = self.rest_of
        while loader is not None:  # so that its next epoch is the one after this, too
            loader.iteration = max(loader.iteration, self.iteration)
            loader = loader.rest_of

    # ---- reading ------------------------------------------------------------------------------------------------

    def _synchronize(self) -> Callable[[], object] | None:
        """Synchronize the random generators of all processes.

        Returns:
            A function that restores this process's own random states, to be called once the order is drawn; None where
            they did not change.
        """
        raise NotImplementedError

    def _open(self, reading: Reading) -> OpenEpoch:
        """Begin to read the epoch."""
        raise NotImplementedError

    def _end_reached(self, item: Any) -> None:
        """Note that an item is the last one."""
        self.end_of_dataloader = self.epoch.at_end = True

    def _grouped(self, batches: Iterator[Any]) -> Iterator[Any]:
        """What makes up each batch of this loader, from the batches of the loader that it wraps."""
        return batches

    def _read(
        self, reading: Reading, start: Callable[[Iterator[Any]], Iterator[Any]] = iter, *, runs_ahead: bool = False
    ) -> tuple[Iterator[Any], End]:
        """The batches of an epoch, and its end: the indices of the next batch tell it where they may be drawn early, else the next batch.

        Args:
            reading: How to read.
            start: What to do with the batches as soon as they are read.
            runs_ahead: Whether to read one ahead in any case.
        """
        indices = self._indices_of(reading.source)
        runs_ahead = runs_ahead or indices is None or reading.skipped > 0
        batches = self._grouped(self._iterate(reading, indices, runs_ahead))
        for _ in range(reading.skipped):
            report_progress()
            self._drop(next(batches, None))
        if reading.skipped:
            restore_rng_state(reading.states)
        batches = start(batches)
        if indices is not None and not runs_ahead:
            assert indices.end is not None  # since the source has begun to read by them
            return batches, indices.end
        end = End()
        return self._one_ahead(batches, end, reading.order_drawn if indices is None else None), end

    def _indices_of(self, source: Any) -> IndicesAhead | None:
        """What tells where the epoch ends; None for streams, and for classes whose batches are no matter of indices alone."""
        if isinstance(self.dataset, IterableDataset) or reads_otherwise(source):
            return None
        if source is self.base_dataloader and self._indices is not None:
            return self._indices  # of persistent workers, too, which keep what they began with
        sampler = source.sampler if source.batch_sampler is None else source.batch_sampler
        indices = IndicesAhead(sampler, self.reads_per_batch, self._drop_last)
        indices.order_check = self.order_check
        if source is self.base_dataloader:
            self._indices = indices
        return indices

    def _iterate(self, reading: Reading, indices: IndicesAhead | None, runs_ahead: bool) -> Iterator[Any]:
        """An iterator over the source, noting the random states of workers that read it."""
        if indices is not None:
            indices.end, indices.order_drawn = None, reading.order_drawn
        with nullcontext() if indices is None else indices.installed(reading.source):
            if self.num_workers and (indices is not None or not self._reads_otherwise):
                return self.epoch.workers.read(reading.source, indices, runs_ahead=runs_ahead)
            batches = iter(reading.source)
        if self.reads_with_torchdata and reading.states:
            call_before_reading(batches, partial(restore_rng_state, reading.states))
        return batches

    def _drop(self, batch: Any) -> None:
        """Called with each batch of a stream that is read and not yielded; None after its end."""

    def _one_ahead(self, batches: Iterator[Any], end: End, order_drawn: Callable[[], object] | None) -> Iterator[Any]:
        """Read one batch ahead, to know the end. A checkpoint has the states from before the one that is read ahead."""
        current = next(batches, NOTHING)
        if self._reads_otherwise:
            check_shard_is_read(self.base_dataloader)
        if order_drawn is not None:
            order_drawn()
        draws_here = self.num_workers == 0
        num_batches = 0
        while current is not NOTHING:
            self.epoch.workers.settle()
            if draws_here:
                self.epoch.reading = capture_cpu_rng_state()
            self._update_state_dict(finished=False)
            following = next(batches, NOTHING)
            num_batches += 1
            if following is NOTHING:
                end.num_batches = num_batches
                self._update_state_dict(finished=True)
            yield current
            current = following

    # ---- what a program may ask -----------------------------------------------------------------------------------

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

    def without_first(self, num_batches: int) -> PreparedLoader:
        """A loader like this one without its first batches; see `accel_data.skipping.skip_first_batches`."""
        arguments: dict[str, Any] = copied_arguments(self) | {
            "iteration": self.iteration,
            "_drop_last": self._drop_last,
        }
        if isinstance(self.dataset, IterableDataset):
            arguments |= {"drop_last": self.drop_last, "batch_size": self.batch_size}
        else:
            skipped = 0 if self._reads_otherwise else num_batches * self.reads_per_batch
            arguments |= without_first(self, skipped)[1]
        if self.reads_what_it_skips:
            arguments["skip_batches"] = num_batches + self.skip_batches
        rest = self._rest_with(
            arguments | {"_non_blocking": self._non_blocking, "use_stateful_dataloader": self.use_stateful_dataloader}
        )
        if is_derived(self.base_dataloader):
            rest.read_with(self.base_dataloader)
        rest.sequence_shard, rest.after_batch = self.sequence_shard, self.after_batch
        rest.epoch = self.epoch
        rest.num_skipped = self.num_skipped + num_batches
        rest.rest_of = self
        draws_for_itself = num_batches > 0 and _draws_for_itself(self.get_sampler())
        rest.leaves_random_numbers = self.leaves_random_numbers or draws_for_itself
        self._leave_to(rest, num_batches)
        return rest

    def _rest_with(self, arguments: dict[str, Any]) -> PreparedLoader:
        """A loader of the same kind and settings.

        Args:
            arguments: Of its constructor, those that all kinds have.
        """
        raise NotImplementedError

    def _leave_to(self, rest: PreparedLoader, num_batches: int) -> None:
        """Have a loader for the rest of the epoch continue it, in place of this one."""
        if num_batches == 0:
            self.epoch.position = None  # the program says where to begin
            return
        self.forget_position()
        if self.epoch.is_restored and self.epoch.at_end and _has_at_most(self, num_batches):
            rest.iteration = self.epoch.number

    @property
    def _reads_otherwise(self) -> bool:
        """Whether it reads through a class of a program that defines what an iteration yields."""
        return is_derived(self.base_dataloader) and reads_otherwise(self.base_dataloader)

    @property
    def reads_what_it_skips(self) -> bool:
        """Whether the first batches of an epoch must be read to leave them out."""
        return isinstance(self.dataset, IterableDataset) or self._reads_otherwise

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


def _has_at_most(dataloader: Any, num_batches: int) -> bool:
    """Whether a loader has at most so many batches; True if its length is not known."""
    try:
        return len(dataloader) <= num_batches
    except TypeError:
        return True


def _draws_for_itself(sampler: Any) -> bool:
    """Whether a sampler does not draw from torch's global generator."""
    return isinstance(sampler, SequentialSampler) or getattr(sampler, "generator", None) is not None
