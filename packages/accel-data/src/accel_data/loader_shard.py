"""A loader that reads this process's share by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from accel_data.adapter import DataLoaderAdapter, DataLoaderStateMixin
from accel_data.iterable_shard import IterableDatasetShard
from accel_data.samplers import batch_sampler_of, get_sampler, innermost
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
    """Whether the epoch began before: then starting leaves torch's random numbers where they were, as going on did."""

    def __iter__(self) -> Any:  # an iterator of batches, which torch's class would not admit
        state = torch.get_rng_state() if self.goes_on else None
        self._synchronize()
        self.set_epoch(self.iteration)
        self.begin()  # type: ignore[attr-defined]
        try:
            batches = self._batches() if self.cut is None else map(self.cut, self._batches())
            yield from batches if state is None else _after_restoring(state, batches)
        finally:
            self.end()  # type: ignore[attr-defined]
        self.iteration += 1

    def _synchronize(self) -> None:
        """Bring the random generators of all processes into one state."""
        raise NotImplementedError

    def _batches(self) -> Iterator[Any]:
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
        return getattr(innermost(batch_sampler_of(self)), "sampler", None) or get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler of single indices."""
        batches = innermost(batch_sampler_of(self))
        batches.sampler = sampler


def _after_restoring(state: torch.Tensor, batches: Iterator[Any]) -> Iterator[Any]:
    """The batches, with torch's generator set back once the first one is there."""
    for index, batch in enumerate(batches):
        if index == 0:
            torch.set_rng_state(state)
        yield batch


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

    def _synchronize(self) -> None:
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)

    def _batches(self) -> Iterator[Any]:
        device, non_blocking = self.device, self._non_blocking
        uneven = isinstance(self.dataset, SplitStream)
        batches: Iterator[Any] = iter(self.base_dataloader)
        if uneven:
            batches = UnevenStream(batches)
        nothing: Any = object()
        current: Any = next(batches, nothing)
        index = 0
        while current is not nothing:
            report_progress()
            if device is not None:
                current = send_to_device(current, device, non_blocking=non_blocking)
            self._update_state_dict(finished=False)
            following = next(batches, nothing)  # so that the last batch is known to be the last
            if following is nothing:
                self._end_reached()
            if index >= self.skip_batches:
                if uneven:
                    current, self.num_real_samples = current
                yield current
            index += 1
            current = following

    def _end_reached(self) -> None:
        self.end_of_dataloader = True
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
