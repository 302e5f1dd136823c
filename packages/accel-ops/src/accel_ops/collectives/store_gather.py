"""What ranks leave for each other in the store of the process group: objects that are gathered, and notes to compare."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from accel_ops.collectives.store_exchange import group_timeout, intervals

SECONDS_TO_LEAVE = 60.0
"""How long the rank that may hold the store waits, in the end, until the others have read everything."""


def own_connection(store: Any) -> Any:
    """A client of the same store that no other thread waits in; the client itself where it cannot be cloned."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


class StoreGather:
    """All-gathers of one process group under one key; every rank of the group makes the same calls.

    Args:
        key: The same on all ranks, and never used before in this store.

    Raises:
        RuntimeError: There is no default process group with a store.
    """

    def __init__(self, key: str) -> None:
        if not has_store():
            raise RuntimeError("There is no process group with a key-value store. Call init_process_group() first.")
        group: Any = dist.group.WORLD
        self._served = dist.distributed_c10d._get_default_store()  # kept: rank 0 may be the one that serves it
        self._store = dist.PrefixStore(f"accelerate_gather/{key}", own_connection(self._served))
        self._rank: int = group.rank()
        self._count: int = group.size()
        self._timeout = group_timeout(group)
        self._num_calls = 0

    def __call__(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order.

        Args:
            value: Of this rank; picklable.

        Raises:
            RuntimeError: A rank did not come within the timeout of the process group, or the store is gone.
        """
        number, self._num_calls = self._num_calls, self._num_calls + 1
        self._store.set(f"{number}/{self._rank}", pickle.dumps(value))  # type: ignore[arg-type]  # bytes, too
        deadline = time.monotonic() + self._timeout
        return [pickle.loads(self._await(f"{number}/{rank}", rank, deadline)) for rank in range(self._count)]

    def leave(self) -> None:
        """End: each rank says that it has read everything; rank 0, which may serve the store, waits for it and tidies up."""
        with contextlib.suppress(RuntimeError):  # the store has gone with a rank that failed
            self._store.add("left", 1)
            if self._rank > 0:
                return
            for waited in intervals():
                if self._store.add("left", 0) >= self._count:
                    break
                if waited > min(SECONDS_TO_LEAVE, self._timeout):
                    return
            for number in range(self._num_calls):
                for rank in range(self._count):
                    self._store.delete_key(f"{number}/{rank}")
            self._store.delete_key("left")

    def _await(self, key: str, rank: int, deadline: float) -> bytes:
        for _ in intervals():
            if self._store.check([key]):
                value: bytes = self._store.get(key)
                return value
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"Rank {rank} did not answer rank {self._rank} within {self._timeout:g} s, the timeout of the process group. "
                    "Check whether it still runs, or increase InitProcessGroupKwargs(timeout=...)."
                )
        raise AssertionError


def has_store() -> bool:
    """Whether there is a default process group whose ranks share a key-value store; those of torch's "fake" backend have none."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_backend() == "fake":
        return False
    return dist.distributed_c10d._get_default_store() is not None


_counts: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
"""Notes of each kind under each default process group: a process may have had more groups than another."""


class FirstNote:
    """A note that each rank of the default process group would leave; the first one stays.

    Args:
        kind: What it is about; the note is the first of that kind, or the second, and so on, on all ranks.
    """

    def __init__(self, kind: str) -> None:
        self._key = ""
        if not has_store():
            return
        group: Any = dist.group.WORLD
        if group not in _counts:
            # a later group may have the same store
            number_of_group = (self._store.add("accelerate_first/ranks", 1) - 1) // group.size()
            _counts[group] = Counter({"": number_of_group})
        counts = _counts[group]
        counts[kind] += 1
        self._key = f"accelerate_first/{counts['']}/{kind}/{counts[kind]}"

    def leave(self, text: str) -> str | None:
        """The note of the rank that came first; None where that is this one."""
        if not self._key or not has_store():
            return None
        mine = f"{dist.get_rank()} {text}"
        rank, _, first = self._store.compare_set(self._key, "", mine).decode().partition(" ")
        return None if int(rank) == dist.get_rank() else first

    def object_to(self, reason: str) -> None:
        """Leave a word for all ranks, those that came before included."""
        self._store.set(f"{self._key}/reason", reason)

    def objection(self) -> str | None:
        """What a rank had to object; None for nothing yet."""
        if not self._key or not has_store() or not self._store.check([f"{self._key}/reason"]):
            return None
        reason: str = self._store.get(f"{self._key}/reason").decode()
        return reason

    @property
    def _store(self) -> Any:
        return dist.distributed_c10d._get_default_store()
