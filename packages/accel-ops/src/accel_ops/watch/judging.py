"""Proof of a deadlock, from the notes that ranks published.

Silence proves nothing: a rank may compute, load or save for as long as it likes while the others wait. What proves it:

- two ranks have called different collectives of a process group under one number, or one with shapes that do not fit;
- a rank waits for one that has ended, or has left its process group;
- ranks wait for each other in a circle: each is in a collective that the next one has not called, and cannot call;
- a rank waits for one that reads standard input, which is neither rank 0 nor at a terminal.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from types import TracebackType

from accel_ops.watch.calls import ITEM_BYTES, WORDS_OF_DTYPES, Call
from accel_ops.watch.notes import ENDED, STANDS, Note, first
from accel_state.supervision import SIGNS_OF_LOSS

WITHOUT_STORE = "Rank 0, whose process held the key-value store of the process group, has ended."
SECONDS_TO_ASK = 1.0
SECONDS_TO_END = 5.0

_is_ending = threading.Event()


def stay_silent() -> None:
    """Print no error that follows from now on: the process is about to end with the reason."""
    _is_ending.set()


def sentence(gone: Mapping[int, Note]) -> str:
    """Say which ranks have ended, and where in the program; empty for none."""
    return " ".join(
        f"Rank {rank} {note.operation}{f' at {note.line}' if note.line and note.line[0] != '(' else ''}."
        for rank, note in sorted(gone.items())
    )


def rank_0_has_the_store() -> bool:
    """Whether the key-value store ends with the process of rank 0, rather than with the launcher."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") != "True"


def explain_errors(explain: Callable[[float], str]) -> None:
    """Add to uncaught errors that follow from the end of another rank which rank it was.

    Args:
        explain: Finds out which ranks have ended, within so many seconds.
    """
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _is_ending.is_set():
            time.sleep(SECONDS_TO_END)
        if any(sign in str(error) for sign in SIGNS_OF_LOSS) and (reason := explain(SECONDS_TO_ASK)):
            error.add_note(f"  {reason} Every rank must call a collective as often as the others.")
        previous(kind, error, trace)

    sys.excepthook = excepthook


Notes = Mapping[int, Note]

SECONDS_EQUAL = 3.0  # how long ranks stand in what looks like one collective before their calls are compared
SECONDS_IN_A_CIRCLE = 1.0
SECONDS_AFTER_LEAVING = 0.4
SECONDS_AFTER_THE_END = 1.0  # the launcher sees with which exit code or error, and ends the others itself
SECONDS_OF_INPUT = 3.0
BYTES_PER_SECOND = 10e6  # a slow network
MOST_ROWS = 24
WAITING = frozenset({"collective", "peer"})
"""The kinds of operations in which a rank that stands does wait for others; in all others it may also compute."""

FINISHED, LEFT, RAISED, DIED = "has ended", "has left the process group", "raised", "died"
"""How a rank ended: the first words of the operation of its note."""

SAME_ORDER = (
    "Every rank must call the same collectives in the same order: look for a branch that only some ranks take, a loop "
    "that is shorter on some ranks (data loaders of different lengths, an early break), or an exception that was caught."
)
SAME_SHAPES = (
    "Every rank must pass as many elements of the same dtype: pad them with accelerator.pad_across_processes, or use "
    "accelerator.gather, which takes different sizes in dimension 0 after padding."
)
AS_OFTEN = (
    "Every rank must call a collective as often as the others, and may end only after the last one: look for a loop that is "
    "shorter on some ranks, a return, sys.exit or end_training that only some ranks reach."
)
NO_INPUT = "Read the input on the main process only, and send it to the others with broadcast_object_list."


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why ranks are deadlocked.

    Attributes:
        title: What happened, as a sentence without a full stop.
        rows: For each rank the operation and the line of the program.
        advice: What to do.
    """

    title: str
    rows: Mapping[int, tuple[str, str]]
    advice: str

    def __str__(self) -> str:
        table = [("rank", "operation", "at")]
        by_row: dict[tuple[str, str], list[int]] = {}
        for rank, row in sorted(self.rows.items()):
            by_row.setdefault(row, []).append(rank)
        table += [(first(ranks), *row) for row, ranks in list(by_row.items())[:MOST_ROWS]]
        widths = [max(len(row[column]) for row in table) for column in (0, 1)]
        lines = [f"{rank:{widths[0]}}  {operation:{widths[1]}}  {line}" for rank, operation, line in table]
        return f"{self.title}.\n\n" + "\n".join(lines) + f"\n\n{self.advice}\n"


def may_conflict(own: Note, other: Note, waited: float) -> bool:
    """Whether the calls of two ranks should be compared: a cheap test that running ranks never pass.

    Args:
        own: The note of a rank that stands.
        other: The note of another one.
        waited: For how many seconds the first one has stood.
    """
    if not own.kind:
        return False
    if other.state == ENDED or other.reads_input:
        return True
    if other.state != STANDS or not other.kind:
        return False
    looks_equal = (own.kind, own.group, own.operation, own.data) == (
        other.kind,
        other.group,
        other.operation,
        other.data,
    )
    return not looks_equal or waited > SECONDS_EQUAL


def judge(me: int, notes: Notes, before: Notes, waited: float, since_end: Mapping[int, float]) -> Verdict | None:
    """Look for a proof that this rank is deadlocked.

    Args:
        me: This rank, which stands.
        notes: The notes of all ranks, with its own.
        before: Those of the reading before.
        waited: For how many seconds this rank has stood.
        since_end: For how many seconds this rank has known that others have left, or their processes have exited.

    Returns:
        The proof; None if there is none.
    """
    # The strongest proof first: two calls that do not fit, then a rank that is gone, then a circle.
    own = notes[me]
    for rank, other in notes.items():
        if rank != me and (verdict := _different_calls(me, rank, notes)):
            return verdict
        if rank != me and _misses(own, rank, other) and (verdict := _gone(me, rank, notes, since_end.get(rank, 0.0))):
            return verdict
        if other.reads_input and rank > 0 and rank in _waits_with(own) and waited > SECONDS_OF_INPUT:
            return Verdict(
                f"Rank {me} waits for rank {rank}, which waits for standard input",
                _rows(notes) | {rank: ("reads standard input", other.line)},
                NO_INPUT,
            )
    return _circle(me, notes, before, waited)


def _different_calls(me: int, rank: int, notes: Notes) -> Verdict | None:
    mine, others = notes[me].calls or {}, notes[rank].calls or {}
    for name in mine.keys() & others.keys():
        ranks = mine[name].ranks
        if ranks != others[name].ranks:  # another group of this name
            continue
        for number in sorted(mine[name].calls.keys() & others[name].calls.keys()):
            one, other = mine[name].calls[number], others[name].calls[number]
            if not (one.is_done or other.is_done or one.matches(other)):
                return _verdict_on(me, rank, name, one, other, notes)
    return None


def _verdict_on(me: int, rank: int, group: str, one: Call, other: Call, notes: Notes) -> Verdict:
    rows = {each: _row_at(note, group, one.number) for each, note in notes.items()}
    pair = first([me, rank])
    where = f"(number {one.number} in process group {group!r})"
    if one.name == other.name:
        return Verdict(f"Ranks {pair} called {one.name} with tensors that do not fit {where}", rows, SAME_SHAPES)
    return Verdict(f"Ranks {pair} called different collectives {where}", rows, SAME_ORDER)


def _gone(me: int, rank: int, notes: Notes, seconds: float) -> Verdict | None:
    other = notes[rank]
    patience = SECONDS_AFTER_LEAVING if other.operation == LEFT else SECONDS_AFTER_THE_END
    if other.state != ENDED or seconds < patience:
        return None
    return Verdict(f"Rank {me} waits for rank {rank}, which {other.operation}", _rows(notes), AS_OFTEN)


def _circle(me: int, notes: Notes, before: Notes, waited: float) -> Verdict | None:
    """A circle of ranks, each of which waits for the next."""
    # A rank may still be sending: the circle has to stand for longer than its tensors need on a slow network.
    path = _path_to(me, me, notes, before, ())
    if path is None or waited < SECONDS_IN_A_CIRCLE + max(_seconds_to_send(notes[rank]) for rank in path):
        return None
    return Verdict(f"Ranks {first(path)} wait for each other", _rows(notes), SAME_ORDER)


def _path_to(goal: int, rank: int, notes: Notes, before: Notes, path: tuple[int, ...]) -> tuple[int, ...] | None:
    if not _has_stood(notes.get(rank), before.get(rank)):
        return None
    path = (*path, rank)
    for other in sorted(_awaited(rank, notes)):
        if other == goal:
            return path
        if other not in path and (route := _path_to(goal, other, notes, before, path)):
            return route
    return None


def _has_stood(now: Note | None, before: Note | None) -> bool:
    """Whether a rank has stood at one point from one reading to the next, and said so both times."""
    if now is None or before is None or now.state != STANDS or before.state != STANDS:
        return False
    return now.stand == before.stand and now.beat > before.beat and now.kind in WAITING


def _awaited(rank: int, notes: Notes) -> Collection[int]:
    """The ranks that block it: members of its collective that have not entered it."""
    note = notes[rank]
    if note.peer is not None:
        return {note.peer}
    group = _group_of(note)
    if note.calls is None or group not in note.calls:
        return set()
    last = note.calls[group].last
    ranks = set()
    for other in note.calls[group].ranks:
        calls = notes[other].calls if other in notes else None
        if other != rank and calls is not None and group in calls and calls[group].last < last:
            ranks.add(other)
    return ranks


def _misses(own: Note, rank: int, other: Note) -> bool:
    """Whether a rank that stands waits for one that has ended, if it has."""
    if own.kind in WAITING:
        return rank in _waits_with(own)
    # it may compute, after all are done: it waits only if it has called more than the other one ever will
    group = _group_of(own)
    calls = (own.calls or {}).get(group)
    if calls is None or rank not in calls.ranks or group not in other.counts:
        return False
    return own.counts.get(group) == calls.last > other.counts[group]  # sends and recvs would count as well


def _waits_with(note: Note) -> Collection[int]:
    """The ranks that take part in what a rank waits in."""
    if note.kind not in WAITING:
        return set()
    if note.peer is not None:
        return {note.peer}
    group = _group_of(note)
    return set(note.calls[group].ranks) if note.calls and group in note.calls else set()


def _group_of(note: Note) -> str:
    """The process group of the collective that a rank is in; where C++ called it, that of its last call."""
    if note.group or not note.calls or not note.kind:
        return note.group
    latest = {name: calls.calls[calls.last].nanoseconds for name, calls in note.calls.items() if calls.calls}
    return max(latest, key=lambda name: latest[name], default="")


def _row_at(note: Note, group: str, number: int) -> tuple[str, str]:
    """What a rank called under a number, and where: only the line of what it is in now is known."""
    calls = (note.calls or {}).get(group)
    if calls is None or number not in calls.calls:
        return _row(note)
    call = calls.calls[number]
    if number < calls.last:
        return f"{call.name}  {call.data}".rstrip(), f"before {note.line}"
    name = f"{call.name} in backward" if note.kind == "backward" else note.operation or call.name
    return f"{name}  {call.data}".rstrip(), note.line


def _seconds_to_send(note: Note) -> float:
    """How long the data of a send or recv may be on their way."""
    match = re.match(r"(\w+)\[([\d, ]*)\]", note.data) if note.peer is not None else None
    if match is None:
        return 0.0
    words = {word: ITEM_BYTES[name] for name, word in WORDS_OF_DTYPES.items()}
    shape = [int(size) for size in match[2].split(",") if size.strip()]
    return 1.0 + words.get(match[1], 8) * prod(shape) / BYTES_PER_SECOND


def _rows(notes: Notes) -> dict[int, tuple[str, str]]:
    return {rank: _row(note) for rank, note in notes.items()}


def _row(note: Note) -> tuple[str, str]:
    return f"{note.operation}  {note.data}".rstrip() or "-", note.line or "-"
