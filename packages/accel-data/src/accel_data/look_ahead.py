"""Which batch is the last one, known before its samples are read: the indices of the batches after it say so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import count, islice
from typing import Any

import torch

from accel_data.order_check import OrderCheck


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
        following = map(_copied, self.sampler if check is None else check.noting(self.sampler, 1))
        ahead = deque(islice(following, self.per_batch))
        order_drawn, self.order_drawn = self.order_drawn, None
        if order_drawn is not None:
            order_drawn()
        empty, self.empty_first = self.empty_first, 0
        yield from ([] for _ in range(empty))
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

    def are_last(self) -> Iterator[bool]:
        """For each batch, whether it is the last one; to be asked when that batch was read."""
        return (number == self.num_batches for number in count(1))
