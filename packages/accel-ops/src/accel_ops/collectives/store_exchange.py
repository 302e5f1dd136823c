"""Exchanges each rank's success or error through the store of the process group instead of a collective.

A rank whose attempt ended early must not enter a collective: others may still be in another one, with tensors of other
sizes.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

SECONDS_WITHOUT_TIMEOUT = 1800.0
FIRST_PAUSE_SECONDS = 0.0005
LONGEST_PAUSE_SECONDS = 0.05

_numbers: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()
"""The attempts under each default process group: a process may have had more groups than another."""


def exchange_outcomes(outcome: str) -> list[str]:
    """Exchange with all ranks what the attempt came to, and wait until all have published theirs.

    Args:
        outcome: Of this rank; every rank must call this as often as the others.

    Returns:
        The outcomes by rank; only this rank's own where there is no process group (any more).

    Raises:
        RuntimeError: A rank published nothing within the timeout of the process group.
    """
    prefix = note_outcome(outcome)
    if prefix is None:
        return [outcome]
    group: Any = dist.group.WORLD
    store = dist.distributed_c10d._get_default_store()
    timeout = group_timeout(group)
    deadline = time.monotonic() + timeout
    outcomes = [_wait_for(store, prefix, rank, outcome, deadline, timeout) for rank in range(group.size())]
    if store.add(f"{prefix}/readers", 1) == group.size():  # a later group may have the same store
        for name in ("readers", *range(group.size())):
            store.delete_key(f"{prefix}/{name}")
    return outcomes


def note_outcome(outcome: str) -> str | None:
    """Publish what this rank's attempt came to, without waiting for the others.

    Returns:
        The prefix of the outcomes of this attempt in the store; None where there is no process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    number = next(_numbers.setdefault(dist.group.WORLD, itertools.count()))
    prefix = f"accelerate_outcomes/{number}"
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{prefix}/{dist.get_rank()}", outcome)
    return prefix


def _wait_for(store: Any, prefix: str, rank: int, outcome: str, deadline: float, timeout: float) -> str:
    for _ in intervals():
        if store.check([f"{prefix}/{rank}"]):
            return str(store.get(f"{prefix}/{rank}").decode())
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"Rank {rank} has not finished its attempt within {timeout:g} s, the timeout of the process group; "
                f"that of this rank came to {outcome!r}. Rank {rank} may wait in a collective for this one. Choose a smaller "
                "starting_batch_size, or let all ranks run out of memory at the same batch."
            )
    raise AssertionError


def intervals() -> Iterator[float]:
    """Yield the seconds since the beginning, with pauses between that grow from a fraction of a millisecond."""
    begin = time.monotonic()
    pause = FIRST_PAUSE_SECONDS
    while True:
        yield time.monotonic() - begin
        time.sleep(pause)
        pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)


def group_timeout(group: Any) -> float:
    """The timeout of a process group's collectives, in seconds."""
    with contextlib.suppress(AttributeError, RuntimeError, IndexError):
        backend = group._get_backend(group._device_types[0])
        return float(backend.options._timeout.total_seconds())
    return SECONDS_WITHOUT_TIMEOUT
