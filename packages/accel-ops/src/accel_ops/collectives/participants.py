"""Agrees through the store, without a collective, which ranks take part in `save_state`.

A collective would hang if a rank never joins it, as in `if accelerator.is_main_process: save_state(...)`. So
ranks leave notes in the key-value store of the process group instead. The main process opens a call and is the only one
to decide who takes part: all ranks, once all others have left a note, or itself alone, when it is shown that one of them
is elsewhere (it waits in a `wait_for_everyone` that the main process has not reached, or has left the process group) or
when no rank joins within the timeout. A rank that makes the call after that decision reads it from the store.
"""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from accel_ops.collectives.agreement import RankInfo
from accel_ops.collectives.store_exchange import group_timeout, intervals
from accel_ops.collectives.store_gather import own_connection
from accel_state import shutdown
from accel_state.logging import get_logger
from accel_state.supervision import report_progress

PATIENCE_SECONDS = 10.0
"""How long the main process waits for the other ranks where it can save without them."""
SHORT_PATIENCE_SECONDS = 0.5
"""The same, after a call of the kind that no other rank has joined, not even later."""
LONG_PATIENCE_SECONDS = 300.0
"""How long it waits where it cannot save without them, or where some have joined already."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class JoinedCall:
    """One call, and the decision of the main process who takes part in it.

    Attributes:
        key: Prefix of its notes in the store; empty without a store.
        everyone: Whether all ranks take part.
        waited: For how many seconds the main process waited for the others.
        facts: What the main process published about it.
    """

    key: str
    everyone: bool
    waited: float
    facts: dict[str, Any]


class Participants:
    """The notes that the ranks of a process group leave for each other.

    Args:
        store: The key-value store of the group.
        group: The process group.
    """

    def __init__(self, store: Any, group: Any) -> None:
        self._store = dist.PrefixStore("accelerate_attendance", store)
        self._weak_group = weakref.ref(group)  # whoever holds a group keeps its threads
        self._rank: int = group.rank()
        self._world: int = group.size()
        self._num_waits = 0
        self._numbers: dict[str, int] = {}  # by kind of call: how many were opened, or the last one looked at
        self._places: dict[str, list[int]] = {}
        self._alone: dict[str, str] = {}  # by kind of call: the key of the last one, if it was made alone
        self.has_warned = False
        shutdown.on_close(self.leave)

    @property
    def timeout(self) -> float:
        """The timeout of the group's collectives, in seconds."""
        return group_timeout(self._weak_group())

    # ---- what a rank does elsewhere -----------------------------------------------------------------------------

    def note_wait(self) -> None:
        """Leave a note that this rank now waits for everyone."""
        self._num_waits += 1
        self._store.set(f"at/{self._rank}", str(self._num_waits))

    def leave(self) -> None:
        """Leave a note that this rank has left the process group."""
        # The store of another group may be gone.
        is_current = dist.is_initialized() and self._weak_group() is dist.group.WORLD
        if self._rank > 0 and is_current:  # the store may end with the main process
            with contextlib.suppress(RuntimeError):
                self._store.set(f"at/{self._rank}", "left")

    def _is_elsewhere(self, rank: int) -> bool:
        """Whether a rank is in a `wait_for_everyone` that this one has not begun, or is gone."""
        if not self._store.check([f"at/{rank}"]):
            return False
        note = self._store.get(f"at/{rank}").decode()
        return note == "left" or int(note) > self._num_waits

    # ---- the main process ---------------------------------------------------------------------------------------

    def open(self, kind: str, *, can_do_alone: bool, facts: dict[str, Any]) -> JoinedCall:
        """Begin a call on the main process: wait for the others, and decide.

        Args:
            kind: What is called.
            can_do_alone: Whether the main process can go through with it alone.
            facts: Published for the other ranks; JSON.
        """
        patience = PATIENCE_SECONDS if can_do_alone else self._long_patience
        if (last := self._alone.pop(kind, None)) is not None and not self._store.check(self._notes(last)):
            patience = min(SHORT_PATIENCE_SECONDS, patience)
        key = self.open_at_once(kind, facts)
        begin = time.monotonic()
        everyone = self._await_others(kind, key, patience, can_do_alone)
        if not everyone and can_do_alone:
            self._alone[kind] = key
        self._store.set(f"{key}/mode", "together" if everyone else "alone")
        return JoinedCall(key, everyone, time.monotonic() - begin, facts)

    def open_at_once(self, kind: str, facts: dict[str, Any], *, alone: bool = False) -> str:
        """Begin a call on the main process without waiting for anybody, and return its key.

        Args:
            kind: What is called.
            facts: Published for the other ranks; JSON.
            alone: Decide at once that the main process makes it alone.
        """
        number = self._numbers[kind] = self._numbers.get(kind, 0) + 1
        key = f"{kind}/{number}"
        self._store.set(f"{key}/opened", json.dumps({"place": self._place(kind), "facts": facts}))
        if alone:
            self._store.set(f"{key}/mode", "alone")
        self._store.set(f"{kind}/last", str(number))
        return key

    def _await_others(self, kind: str, key: str, patience: float, can_do_alone: bool) -> bool:
        notes = self._notes(key)
        has_said = False
        for waited in intervals():
            if self._store.check(notes):
                return True
            absent = [rank for rank, note in enumerate(notes, 1) if not self._store.check([note])]
            if any(self._is_elsewhere(rank) for rank in absent):
                return False
            if waited >= (self._long_patience if len(absent) < len(notes) else patience):
                return False
            if waited >= PATIENCE_SECONDS and not can_do_alone and not has_said:
                has_said = True
                logger.warning(
                    "%s() on the main process waits for processes %s, which have not called it. If only the main process "
                    "calls it, call it on all processes: each holds a shard of what is saved.",
                    kind,
                    ", ".join(map(str, absent)),
                )
        raise AssertionError

    def _notes(self, key: str) -> list[str]:
        """The notes that all other ranks leave when they make a call."""
        return [f"{key}/here/{rank}" for rank in range(1, self._world)]

    @property
    def _long_patience(self) -> float:
        return min(LONG_PATIENCE_SECONDS, self.timeout / 2)

    def finish(self, call: JoinedCall, facts: dict[str, Any]) -> None:
        """Publish the outcome of a call that the main process made alone; JSON. Any thread may do it."""
        own_connection(self._store).set(f"{call.key}/done", json.dumps(facts))

    # ---- the others ---------------------------------------------------------------------------------------------

    def join(self, kind: str) -> JoinedCall:
        """Take part in a call of the main process, which may make it later or have made it already.

        Raises:
            RuntimeError: The main process is elsewhere, or did not make it within the timeout of the process group.
        """
        place = self._place(kind)
        for waited in intervals():
            if (number := self._opened_since(kind, place)) is not None:
                key = f"{kind}/{number}"
                self._numbers[kind] = number
                self._store.set(f"{key}/here/{self._rank}", "1")
                mode = self._await_note(f"{key}/mode", kind)
                facts = json.loads(self._store.get(f"{key}/opened"))["facts"]
                return JoinedCall(key, mode == "together", 0.0, facts)
            if self._is_elsewhere(0) or waited > self.timeout:
                raise RuntimeError(
                    f"{kind}() was called on process {self._rank}, but the main process did not call it"
                    f" ({'it is in wait_for_everyone' if waited <= self.timeout else f'for {waited:.0f} s'}). Call "
                    f"{kind}() on all processes."
                )
        raise AssertionError

    def outcome(self, call: JoinedCall, kind: str) -> dict[str, Any]:
        """The outcome of a call that the main process makes alone; waits until it has ended.

        Raises:
            RuntimeError: It did not end within the timeout of the process group.
        """
        outcome: dict[str, Any] = json.loads(self._await_note(f"{call.key}/done", kind))
        return outcome

    def _opened_since(self, kind: str, place: list[int]) -> int | None:
        """The number of the call of the main process that a call from here belongs to, if it has begun."""
        if not self._store.check([f"{kind}/last"]):
            return None
        for number in range(self._numbers.get(kind, 0) + 1, int(self._store.get(f"{kind}/last")) + 1):
            if not self._store.check([f"{kind}/{number}/mode"]):
                return number
            if json.loads(self._store.get(f"{kind}/{number}/opened"))["place"] >= place:
                return number
            self._numbers[kind] = number  # the main process made that one alone, earlier in the program
        return None

    def _await_note(self, key: str, kind: str) -> str:
        for waited in intervals():
            if self._store.check([key]):
                return str(self._store.get(key).decode())
            if waited > self.timeout:
                raise RuntimeError(
                    f"{kind}() on process {self._rank} timed out: the main process did not finish it in {waited:.0f} s. Check "
                    "what the main process does, or increase InitProcessGroupKwargs(timeout=...)."
                )
        raise AssertionError

    def _place(self, kind: str) -> list[int]:
        """Where in the program this rank is: collectives so far, and calls of this kind since the last of them.

        Ranks agree on it wherever they agree on collectives.
        """
        try:
            group: Any = self._weak_group()
            sequence = int(group._get_sequence_number_for_group())
        except (AttributeError, RuntimeError):  # a backend that does not count
            sequence = 0
        before = self._places.get(kind)
        again = before[1] + 1 if before is not None and before[0] == sequence else 0
        self._places[kind] = [sequence, again]
        return self._places[kind]


_known: list[Participants] = []


def participants() -> Participants | None:
    """The notes of the ranks of the default process group; None where there is no group, no store, or one rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group: Any = dist.group.WORLD
    if _known and _known[0]._weak_group() is group:
        return _known[0]
    store = dist.distributed_c10d._get_default_store()
    if store is None or group.size() == 1:
        return None
    _known[:] = [Participants(store, group)]
    return _known[0]


def begin_call(
    kind: str, state: RankInfo, facts: dict[str, Any], *, sharded_by: str | None = None, main_writes_all: bool = False
) -> JoinedCall | None:
    """Find out whether all ranks make a call, or the main process alone.

    Args:
        kind: The method that is called, for the user.
        state: Says which process this is.
        facts: What the main process publishes about the call for the other ranks.
        sharded_by: The engine under which each rank holds a shard of what is saved; None where each holds all of it.
        main_writes_all: Whether the main process can write everything by itself, where each rank holds all of it.

    Returns:
        Who takes part; None if all ranks do, or if that cannot be determined.

    Raises:
        RuntimeError: It was called on some ranks only, and what is to be saved is sharded over all of them.
    """
    report_progress()
    has_no_group_left = (
        state.num_processes > 1 and getattr(state, "backend", None) is not None and not dist.is_initialized()
    )
    notes = participants()
    if has_no_group_left:
        call = JoinedCall("", False, 0.0, facts)
    elif notes is None or state.num_processes == 1:
        return None
    elif state.process_index > 0:
        call = notes.join(kind)
    elif sharded_by is None and main_writes_all:
        call = JoinedCall(notes.open_at_once(kind, facts, alone=True), False, 0.0, facts)
    else:
        call = notes.open(kind, can_do_alone=sharded_by is None, facts=facts)
    if not call.everyone and sharded_by is not None:
        why = "the process group has ended" if has_no_group_left else "some processes did not call it"
        raise RuntimeError(
            f"{kind}() needs all processes, but {why}. With the {sharded_by!r} engine each process holds a shard of what is "
            f"saved. Call {kind}() on all processes, without `if accelerator.is_main_process`."
        )
    return call


@contextmanager
def publishing_outcome(call: JoinedCall) -> Iterator[dict[str, Any]]:
    """A block on the main process whose outcome is published at its end, for ranks that make the call later.

    Yields:
        The outcome to publish, as a dict to be filled.
    """
    outcome: dict[str, Any] = {}
    notes = participants()  # the block may end in another thread, when the process group is gone
    try:
        yield outcome
    except BaseException as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        if call.key and notes is not None:
            notes.finish(call, outcome)


def outcome_of(call: JoinedCall, kind: str) -> dict[str, Any]:
    """The outcome of a call that the main process makes alone; empty where the process group has ended."""
    notes = participants()
    return {} if notes is None or not call.key else notes.outcome(call, kind)
