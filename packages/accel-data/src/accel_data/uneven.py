"""Streams whose parts differ in length: processes go on until all have finished."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from accel_ops.collectives import gather


class UnevenStream:
    """Batches of this process's part, and when others have more, its first batch again.

    Before each batch the processes tell one another whether they have one. Yields pairs: the batch, and how many of
    its samples are real: None for all, 0 for a repeated batch, which `gather_for_metrics` leaves out.

    Args:
        batches: This process's batches.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._first: Any = None
        self._finished = False

    def __iter__(self) -> UnevenStream:
        return self

    def __next__(self) -> tuple[Any, int | None]:
        batch = None if self._finished else next(self._batches, None)
        self._finished = batch is None
        if self._first is None:
            self._first = batch
        have, lacking = (
            gather(torch.tensor([[int(batch is not None), int(self._first is None)]])).view(-1, 2).sum(0).tolist()
        )
        if have == 0:
            raise StopIteration
        if lacking:
            raise ValueError(
                f"{lacking} of the processes that share a stream got no sample at all, so they cannot go along with "
                "the others: use fewer processes, or a stream with more shards."
            )
        return (self._first, 0) if batch is None else (batch, None)
