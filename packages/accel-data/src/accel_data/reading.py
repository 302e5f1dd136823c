"""The random states that a batch is read from in this process, for datasets that draw random numbers (augmentation).

See `worker_reading` for those of workers.

A loader reads one batch ahead. A checkpoint that is saved meanwhile has the states after that, so a resumed run would draw
other numbers for that batch: those before it are stored besides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from accel_data.epoch_order import EpochOrder
from accel_ops.random import capture_cpu_rng_state, same_rng_states

CHEAP = "torch_manual_seed"
"""The state that is captured before every batch, because that takes 1 us; the others take 40."""
COMPARED_AT_START = 2
COMPARED_EVERY = 16
"""At the first batches and at every so-many-th, all states are compared, to find out which ones reading changes."""


class ReadAhead:
    """Reads batches one by one, and notes the random states from which the last one was read.

    Args:
        batches: What to read.
        order: Where they are noted: those of generators that reading draws from.
        draws_here: Whether this process reads samples; otherwise nothing is noted.
    """

    def __init__(self, batches: Iterator[Any], order: EpochOrder, *, draws_here: bool) -> None:
        self._batches = batches
        self._order = order
        self._draws_here = draws_here
        self._drawn: set[str] = set()
        self._count = 0

    def next(self, default: Any) -> Any:
        """The next batch, or `default` at the end."""
        self._order.workers.settle()
        if not self._draws_here:
            return next(self._batches, default)
        compares = self._count < COMPARED_AT_START or self._count % COMPARED_EVERY == 0
        self._count += 1
        if compares or self._drawn - {CHEAP}:
            before = capture_cpu_rng_state()
        else:
            before = {CHEAP: torch.get_rng_state()}
        batch = next(self._batches, default)
        if compares:
            after = capture_cpu_rng_state()
            self._drawn |= {name for name in before if not same_rng_states(before[name], after[name])}
        self._order.reading = {name: state for name, state in before.items() if name in self._drawn}
        return batch
