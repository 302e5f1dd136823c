"""Skipping the first batches of an epoch, to resume in the middle of it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from accel_data.adapter import DataLoaderAdapter, DataLoaderStateMixin, copied_arguments
from accel_data.derived_loaders import is_derived
from accel_data.dispatcher import DataLoaderDispatcher
from accel_data.loader_shard import DataLoaderShard
from accel_data.prepared_loader import PreparedLoader
from accel_data.samplers import without_first
from accel_state.gradient_state import GradientState
from accel_state.public_names import known_as


@known_as("accelerate.data_loader.SkipDataLoader")
class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that reads its first batches without yielding them, for streams.

    Args:
        dataset: As for `torch.utils.data.DataLoader`.
        skip_batches (`int`): The number of batches to skip.
        use_stateful_dataloader (`bool`): Read through torchdata's `StatefulDataLoader`.
        kwargs: For `torch.utils.data.DataLoader`.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches
        self.gradient_state = GradientState()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for index, batch in enumerate(self.base_dataloader):
            if index >= self.skip_batches:
                self._update_state_dict(finished=False)
                yield batch
        self._update_state_dict(finished=True)

    def __len__(self) -> int:
        return max(0, len(self.base_dataloader) - self.skip_batches)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """A loader like the given one, without its first batches.

    Args:
        dataloader (`torch.utils.data.DataLoader`): A prepared loader, or any other.
        num_batches (`int`): How many batches (of this process) to leave out. Their samples are not read, except from a
            stream, which can only be read from the start.

    Returns:
        A new loader, of the same kind. After `load_state` of a checkpoint saved mid-epoch, it reads that epoch's
        order, from whichever generator it was drawn, and starting it does not change the random states that `load_state`
        restored, such as those of dropout. Without one, the order is the same where it does not depend on torch's own generator (a
        seedable sampler with its epoch set, or no shuffling).

    Raises:
        TypeError: When `num_batches` is no integer.
        ValueError: When it is negative.

    Example:
        ```python
        rest = skip_first_batches(loader, num_batches=100)
        ```
    """
    try:
        num_batches = operator.index(num_batches)
    except TypeError:
        raise TypeError(f"num_batches={num_batches!r}: the number of batches to skip must be an integer.") from None
    if num_batches < 0:
        raise ValueError(f"num_batches={num_batches!r}: the number of batches to skip must be 0 or more.")
    if hasattr(dataloader, "without_first"):  # it wraps a prepared loader
        return dataloader.without_first(num_batches)
    kwargs = copied_arguments(dataloader)
    is_stream = isinstance(dataloader.dataset, IterableDataset)
    is_read = dataloader.reads_what_it_skips if isinstance(dataloader, PreparedLoader) else is_stream
    kind = _kind(dataloader)
    per_batch = dataloader.reads_per_batch if isinstance(dataloader, PreparedLoader) else 1
    if isinstance(dataloader, DataLoaderDispatcher):
        kwargs |= {
            "split_batches": dataloader.split_batches,
            "slice_fn": dataloader.slice_fn,
            "torch_device_mesh": dataloader.torch_device_mesh,
            "_drop_last": dataloader._drop_last,
            "_non_blocking": dataloader._non_blocking,
            "iteration": dataloader.iteration,
        }
    if isinstance(dataloader, DataLoaderShard):
        kwargs |= {
            "device": dataloader.device,
            "rng_types": dataloader.rng_types,
            "synchronized_generator": dataloader.synchronized_generator,
            "_drop_last": dataloader._drop_last,
            "_non_blocking": dataloader._non_blocking,
            "iteration": dataloader.iteration,
        }
    if is_stream:
        kwargs |= {"drop_last": dataloader.drop_last, "batch_size": dataloader.batch_size}
    elif is_read:
        kwargs |= without_first(dataloader, 0)[1]
    if is_read:
        kwargs["skip_batches"] = num_batches + getattr(dataloader, "skip_batches", 0)
        kind = SkipDataLoader if kind is DataLoader else kind
    else:
        skipping, arguments = without_first(dataloader, num_batches * per_batch)
        if isinstance(dataloader, DataLoaderDispatcher) and dataloader.keeps_first is None:
            skipping.keep_first(per_batch)
        kwargs |= arguments
    if issubclass(kind, DataLoaderAdapter):
        kwargs["use_stateful_dataloader"] = getattr(dataloader, "use_stateful_dataloader", False)
    rest = kind(dataloader.dataset, **kwargs)
    if isinstance(dataloader, DataLoaderShard):
        rest.draws_together = dataloader.draws_together
    if isinstance(dataloader, DataLoaderDispatcher) and not is_read:
        rest.keeps_first = skipping if dataloader.keeps_first is None else dataloader.keeps_first
    if isinstance(dataloader, (DataLoaderDispatcher, DataLoaderShard)):
        if is_derived(dataloader.base_dataloader):
            rest.read_with(dataloader.base_dataloader)
        rest.sequence_shard = dataloader.sequence_shard
        rest.after_batch = dataloader.after_batch
        rest.epoch = epoch = dataloader.epoch
        rest.num_skipped = dataloader.num_skipped + num_batches
        if num_batches > 0:
            rest.rest_of = dataloader
            dataloader.forget_position()
            if epoch.is_restored and epoch.at_end and _has_at_most(dataloader, num_batches):
                rest.iteration = epoch.number
        else:
            rest.rest_of = dataloader.rest_of
            epoch.position = None  # the program says where to begin
        draws_own = num_batches > 0 and _draws_for_itself(dataloader.get_sampler())
        rest.leaves_random_numbers = dataloader.leaves_random_numbers or draws_own
    return rest


def _has_at_most(dataloader: Any, num_batches: int) -> bool:
    """Whether a loader has at most so many batches; True if its length is not known."""
    try:
        return len(dataloader) <= num_batches
    except TypeError:
        return True


def _draws_for_itself(sampler: Any) -> bool:
    """Whether a sampler does not draw from torch's global generator."""
    return isinstance(sampler, SequentialSampler) or getattr(sampler, "generator", None) is not None


def _kind(dataloader: Any) -> type:
    kinds = (DataLoaderDispatcher, DataLoaderShard, SkipDataLoader)
    return next((kind for kind in kinds if isinstance(dataloader, kind)), DataLoader)
