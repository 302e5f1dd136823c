"""Skipping the first batches of an epoch, to resume in the middle of it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accel_data.adapter import DataLoaderAdapter, DataLoaderStateMixin, copied_arguments
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
    if hasattr(dataloader, "without_first"):  # a prepared loader, or one that wraps one
        return dataloader.without_first(num_batches)
    kwargs = copied_arguments(dataloader)
    if not isinstance(dataloader.dataset, IterableDataset):
        return DataLoader(dataloader.dataset, **kwargs, **without_first(dataloader, num_batches)[1])
    return SkipDataLoader(
        dataloader.dataset,
        skip_batches=num_batches + getattr(dataloader, "skip_batches", 0),
        use_stateful_dataloader=getattr(dataloader, "use_stateful_dataloader", False),
        batch_size=dataloader.batch_size,
        drop_last=dataloader.drop_last,
        **kwargs,
    )
