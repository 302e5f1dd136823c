"""A loader that reads this process's share by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from accel_data.adapter import DataLoaderAdapter, DataLoaderStateMixin
from accel_data.epoch_order import EpochOrder
from accel_data.iterable_shard import IterableDatasetShard
from accel_data.samplers import batch_sampler_of, index_sampler, innermost
from accel_data.split_stream import SplitStream
from accel_data.uneven import UnevenStream
from accel_ops.placement import send_to_device
from accel_ops.random import synchronize_rng_states
from accel_state.gradient_state import GradientState
from accel_state.public_names import known_as
from accel_state.supervision import report_progress


class EpochMixin:
    """How a loader runs through an epoch, and what it says about the data of all processes together."""

    iteration: int
    cut: Callable[[Any], Any] | None = None
    """What each batch goes through before it is handed out, for processes that hold parts of its sequences."""
    goes_on: bool = False
    """Whether the epoch began before: then starting leaves random numbers where they were, as continuing it would."""
    rest_of: EpochMixin | None = None
    """The loader that `skip_first_batches` made this one from, to read the rest of its epoch."""
    epoch_order: EpochOrder
    is_mid_epoch: bool = False
    """Whether the iteration began after the first batches of an epoch."""

    def __iter__(self) -> Any:  # an iterator of batches, which torch's class would not admit
        order = self.epoch_order
        self.is_mid_epoch = self._take_up_position() or self.rest_of is not None  # type: ignore[attr-defined]
        is_restored = self.is_mid_epoch and order.is_restored and self.iteration == order.epoch
        settle: Callable[[], None] | None = None
        if is_restored:
            settle = order.rewind(self).settle
        elif self.goes_on:
            settle = partial(torch.set_rng_state, torch.get_rng_state())
        settle_own = self._synchronize()
        settle = settle or settle_own
        if not is_restored:
            order.begin(self)
        self.set_epoch(self.iteration)
        self.begin()  # type: ignore[attr-defined]
        try:
            batches = self._batches(settle)
            yield from batches if self.cut is None else map(self.cut, batches)
        except BaseException:
            self.end()  # type: ignore[attr-defined]
            self.gradient_state._leave_dataloader(self)  # type: ignore[attr-defined]
            raise
        self.end()  # type: ignore[attr-defined]
        order.finish()
        self.iteration += 1
        loader = self.rest_of if is_restored else None
        while loader is not None:  # so that its next epoch is the one after this, too
            loader.iteration, loader = max(loader.iteration, self.iteration), loader.rest_of

    def _synchronize(self) -> Callable[[], None] | None:
        """Bring the random generators of all processes into one state.

        Returns:
            What gives this process its own random numbers back once the order is drawn, where it had others.
        """
        raise NotImplementedError

    def _batches(self, settle: Callable[[], None] | None) -> Iterator[Any]:
        """Read the epoch.

        Args:
            settle: To be called once the first batch to hand out was read, before the next one is; resets random
                numbers.
        """
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, for samplers and data sets that shuffle by it."""
        self.iteration = epoch
        batches: Any = batch_sampler_of(self)
        receiver: Any
        for receiver in (batches, getattr(innermost(batches), "sampler", None)):
            if hasattr(receiver, "set_epoch"):
                receiver.set_epoch(epoch)
        if hasattr(self.dataset, "set_epoch"):  # type: ignore[attr-defined]
            self.dataset.set_epoch(epoch)  # type: ignore[attr-defined]

    @property
    def total_dataset_length(self) -> int:
        """Samples over all processes."""
        dataset = self.dataset  # type: ignore[attr-defined]
        return dataset.total_length if hasattr(dataset, "total_length") else len(dataset)

    def get_sampler(self) -> Any:
        """The sampler of single indices."""
        return index_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler of single indices."""
        batches = innermost(batch_sampler_of(self))
        batches.sampler = sampler


@known_as("accelerate.data_loader.DataLoaderShard")
class DataLoaderShard(EpochMixin, DataLoaderAdapter, DataLoaderStateMixin):
    """Reads this process's share, moves it to the device, and knows the last batch before handing it out.

    Args:
        dataset: As for `torch.utils.data.DataLoader`.
        device (`torch.device`, *optional*): Where batches go; they stay where they are when None.
        rng_types (list of `str` or `RNGType`, *optional*): Random generators to synchronise at every beginning.
        synchronized_generator (`torch.Generator`, *optional*): The one meant by "generator".
        skip_batches (`int`): How many batches to read without handing them out.
        use_stateful_dataloader (`bool`): Read through torchdata's `StatefulDataLoader`.
        torch_device_mesh (*optional*): Not used here.
        iteration (`int`): The epoch of the next iteration.
        kwargs: For `torch.utils.data.DataLoader`.
    """

    num_real_samples: int | None = None
    """How many samples of the current batch are not repeated ones; None for all."""
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
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.gradient_state = GradientState()
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.iteration = iteration
        self.epoch_order = EpochOrder()

    def _synchronize(self) -> Callable[[], None] | None:
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        if not self.draws_together:
            return None
        own = torch.get_rng_state()
        synchronize_rng_states(["torch"])
        return None if torch.equal(own, torch.get_rng_state()) else partial(torch.set_rng_state, own)

    def _batches(self, settle: Callable[[], None] | None) -> Iterator[Any]:
        device, non_blocking = self.device, self._non_blocking
        uneven = isinstance(self.dataset, SplitStream)
        batches: Iterator[Any] = iter(self.base_dataloader)
        if uneven:
            batches = UnevenStream(batches)
        nothing: Any = object()
        current: Any = next(batches, nothing)
        for _ in range(self.skip_batches if current is not nothing else 0):
            report_progress()
            current = next(batches, nothing)
            if current is nothing:
                self._end_reached()
                break
        if settle is not None:
            settle()
        while current is not nothing:
            report_progress()
            if device is not None:
                current = send_to_device(current, device, non_blocking=non_blocking)
            self._update_state_dict(finished=False)
            following = next(batches, nothing)  # so that the last batch is known to be the last
            if following is nothing:
                self._end_reached()
            if uneven:
                current, self.num_real_samples = current
            yield current
            current = following

    def _end_reached(self) -> None:
        self.end_of_dataloader = self.epoch_order.at_end = True
        self._update_state_dict(finished=True)
        if self.remainder == -1 and not self._drop_last:  # a stream's length is known now that it has ended
            self.remainder = getattr(self.dataset, "last_round_size", -1)

    @property
    def total_batch_size(self) -> int:
        """Samples of one batch over all processes."""
        knows = isinstance(self.dataset, (IterableDatasetShard, SplitStream))
        batches: Any = self.dataset if knows else batch_sampler_of(self)
        if getattr(batches, "split_batches", False):
            return batches.batch_size
        return batches.batch_size * getattr(batches, "num_processes", 1)
