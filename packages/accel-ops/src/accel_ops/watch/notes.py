"""What ranks tell each other about where they stand: one note each in the key-value store of the process group.

A note is replaced, never added to, and nobody waits for one. The store is reached through a connection of our own,
because a rank that waits for a key blocks the connection that it waits on.
"""

from __future__ import annotations

import contextlib
import json
import socket
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, Self

import torch.distributed as dist

from accel_ops.watch.calls import GroupCalls

SECONDS_TO_REACH = 5.0  # the machine of the store
SECONDS_TO_CONNECT = 20.0  # torch asks DNS for the names of both ends first: each question that gets lost costs 5 s
FOLDER = "accelerate_watch"
RUNS, STANDS, ENDED = "runs", "stands", "ended"
NEVER = 2**40
"""What the counter of questions is raised by when the verdict is published."""


@dataclass(frozen=True, slots=True)
class Note:
    """What a rank tells the others.

    Attributes:
        state: `RUNS`, `STANDS` (its main thread has not moved for a moment) or `ENDED` (it will call no more collectives).
        line: Where it is in the user's program, or last was.
        operation: The collective that it is in; how it ended.
        kind: As in `Position`.
        group: As in `Position`.
        peer: As in `Position`.
        data: As in `Position`.
        stand: Which stand this is, counted by the rank.
        beat: Counts how often the rank has said this.
        reads_input: Whether it waits for standard input.
        host: Its machine, as in `machine`.
        process_id: Its process.
        calls: Its last collectives by process group, where they matter.
        counts: How much it has called in each process group, as `count_calls` counts, where that matters.
    """

    state: str = RUNS
    line: str = ""
    operation: str = ""
    kind: str = ""
    group: str = ""
    peer: int | None = None
    data: str = ""
    stand: int = 0
    beat: int = 0
    reads_input: bool = False
    host: str = ""
    process_id: int = 0
    calls: Mapping[str, GroupCalls] | None = field(default=None, hash=False)
    counts: Mapping[str, int] = field(default_factory=dict, hash=False)

    def to_text(self) -> str:
        """The note as JSON."""
        values = asdict(replace(self, calls=None))
        values["calls"] = None if self.calls is None else {name: each.to_json() for name, each in self.calls.items()}
        return json.dumps(values)

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """The inverse of `to_text`."""
        values: dict[str, Any] = json.loads(text)
        if values["calls"] is not None:
            values["calls"] = {name: GroupCalls.from_json(each) for name, each in values["calls"].items()}
        return cls(**values)


class StoreGoneError(Exception):
    """The process that held the key-value store has ended."""


class Board:
    """The notes of all ranks of one default process group.

    Args:
        store: The TCP store under the store of the group.
        name: A name that no other process group has.
        rank: The rank of this process.
        world: The number of ranks.
    """

    def __init__(self, store: Any, name: str, rank: int, world: int) -> None:
        # closed when the server is: asking a store that is gone would print warnings
        self._lifeline = socket.create_connection((store.host, store.port), timeout=SECONDS_TO_REACH)
        self._lifeline.setblocking(False)
        client = dist.TCPStore(  # not clone(), which tries for as long as the store's timeout when the server has gone
            store.host, store.port, wait_for_workers=False, timeout=timedelta(seconds=SECONDS_TO_CONNECT)
        )
        client.set_timeout(store.timeout)
        self._store = dist.PrefixStore(f"{FOLDER}/{name}", client)
        self._rank = rank
        self._world = world

    def check(self) -> None:
        """Raise when there is no store any more.

        Raises:
            StoreGoneError: Its process has ended.
        """
        try:
            self._lifeline.recv(1)  # not select(), which refuses file descriptors above 1,023
        except BlockingIOError:  # open, and silent
            return
        except OSError:
            pass
        raise StoreGoneError

    def publish(self, note: Note) -> None:
        """Replace the note of this rank."""
        self.check()
        self._store.set(str(self._rank), note.to_text())

    def read(self) -> dict[int, Note]:
        """The notes of the other ranks; ranks that are not watched have none."""
        self.check()
        others = [rank for rank in range(self._world) if rank != self._rank]
        if not self._store.check(list(map(str, others))):
            others = [rank for rank in others if self._store.check([str(rank)])]
        texts = self._store.multi_get(list(map(str, others))) if others else []
        return {rank: Note.from_text(text) for rank, text in zip(others, texts, strict=True)}

    def ask(self) -> int:
        """Ask all ranks to replace their notes; returns the number of questions so far."""
        self.check()
        return int(self._store.add("questions", 1))

    def questions(self) -> int:
        """The number of questions so far; `NEVER` or more once there is a verdict."""
        self.check()
        return int(self._store.add("questions", 0))

    def decide(self, verdict: str) -> bool:
        """Publish the verdict; returns False when another rank has done so already."""
        self.check()
        if self._store.add("verdicts", 1) > 1:
            return False
        self._store.set("verdict", verdict)
        self._store.add("questions", NEVER)
        return True

    def verdict(self) -> str:
        """The verdict, once there is one."""
        self.check()
        return str(self._store.get("verdict").decode())

    def acknowledge(self, number: int = 1) -> int:
        """Say that this rank has seen the verdict; returns how many have."""
        self.check()
        return int(self._store.add("seen", number))

    def close(self) -> None:
        """Remove what this rank has left, and close the connection."""
        with contextlib.suppress(StoreGoneError, RuntimeError):
            self.check()
            for key in (str(self._rank), *(["questions"] if self._rank == 0 else [])):
                self._store.delete_key(key)
        self._lifeline.close()
        self._store = None  # type: ignore[assignment]


def tcp_store(store: Any) -> Any | None:
    """The TCP store under prefixes; None for a store of another kind."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None


def announce_name(store: Any, generation: int) -> str:
    """Choose the name of the board of a process group, on its rank 0.

    Args:
        store: The store of the group.
        generation: How many groups this process has been watched in before: an earlier one may have had this store.
    """
    name = uuid.uuid4().hex
    store.set(f"{FOLDER}/{generation}", name)
    if generation > 0:
        store.delete_key(f"{FOLDER}/{generation - 1}")
    return name


def find_name(store: Any, generation: int) -> str | None:
    """The name that rank 0 chose; None until it has."""
    key = f"{FOLDER}/{generation}"
    return str(store.get(key).decode()) if store.check([key]) else None


def first(ranks: Iterable[int], number: int = 8) -> str:
    """Some ranks as words, `"0, 1 and 4 more"`."""
    listed = sorted(ranks)
    more = len(listed) - number
    return ", ".join(map(str, listed[:number])) + (f" and {more} more" if more > 0 else "")
