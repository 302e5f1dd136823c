"""Notes that the first rank to come leaves for the others in the store of the process group, to compare: nobody waits."""

from __future__ import annotations

from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from accel_ops.collectives.store_gather import has_store

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
