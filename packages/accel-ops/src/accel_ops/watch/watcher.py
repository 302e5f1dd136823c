"""Watchdog thread of each rank: samples the main thread's stack, and aborts the run once a deadlock is proven.

A training step passes nothing of it. The thread looks a few times a second whether the main thread has had CPU time; when
it has been blocked at one point for a moment, it publishes a note and reads those of the other ranks. Which collectives a
rank has called is read from torch's flight recorder, and only once notes of two ranks do not fit together.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from accel_ops.files.owners import machine_id
from accel_ops.watch.calls import GroupCalls, count_calls, read_calls
from accel_ops.watch.judging import (
    DIED,
    LEFT,
    WITHOUT_STORE,
    Verdict,
    judge,
    may_conflict,
    rank_0_has_the_store,
    sentence,
    stay_silent,
)
from accel_ops.watch.notes import (
    ENDED,
    NEVER,
    RUNS,
    STANDS,
    Board,
    Note,
    StoreGoneError,
    announce_name,
    find_name,
    tcp_store,
)
from accel_state import stacks
from accel_state.process_ids import is_running
from accel_state.supervision import REPORT, supervision_folder, write_atomically

TICK_SECONDS = 0.15
STANDING_SECONDS = 0.3
FIRST_READ_SECONDS, LONGEST_READ_SECONDS = 0.3, 1.0  # between two readings of the notes, while this rank stands
QUESTION_SECONDS = 1.0  # between two looks whether anybody asks
READS_PER_SECOND = 10_000.0  # of notes, by all ranks together
BUSY_FRACTION = 0.2  # of the time, from which on the main thread computes
CALLS_FRACTION = 0.02  # of the time, which reading the recorder may take
IDLE_SECONDS = 1.0  # of a stand outside of collectives, before it is told
GOODBYE_SECONDS = 1.2  # for all ranks to see the verdict
SECONDS_TO_STOP = 2.0
SECONDS_TO_EXIT, SECONDS_TO_EXIT_ELSEWHERE = 15.0, 6.0  # of a rank that has ended: closing groups takes up to 5
EXIT_CODE = 1
HOW_TO_SWITCH_OFF = (
    "Set ACCELERATE_WATCH_RANKS=0 (accelerate launch --no_watch_ranks) to wait for the timeout instead."
)


class Watcher:
    """Watches the calling thread, which trains, as one rank of one default process group.

    Args:
        store: The store of the group.
        generation: How many groups this process has been watched in before.
        since_nanoseconds: When the group was made, as in `time.time_ns`; 0 for the first one of this process.
    """

    def __init__(self, store: Any, generation: int, since_nanoseconds: int) -> None:
        group: Any = dist.group.WORLD
        self.group_id = id(group)
        self._spins = "nccl" in str(dist.get_backend_config())  # the host then waits for the device with full load
        self._rank: int = group.rank()
        self._world: int = group.size()
        self._store = store
        # who asks a store that has just ended prints warnings; only those who wait for its rank do not mind
        self._may_poll = self._rank == 0 or not rank_0_has_the_store()
        self.generation = generation
        self._since = since_nanoseconds
        self._watched: int = threading.get_ident()
        self._native_id = threading.get_native_id()  # not the thread's own, which is wrong after a fork
        self._board: Board | None = None
        self._note = Note(host=machine_id(), process_id=os.getpid())
        self._position: stacks.StackPosition | None = None
        self._calls: dict[str, GroupCalls] | None = None
        self._may_read_calls_at = 0.0
        self._signature: tuple[int, ...] = ()
        self._cpu_seconds = 0.0
        self._looked_at = self._stands_since = time.monotonic()
        self._next_read = self._next_question = 0.0
        self._pause = FIRST_READ_SECONDS
        self._questions = 0
        self._asked_at = 0.0
        self._last_line = ""
        self._before: dict[int, Note] = {}
        self._ending_since: dict[int, float] = {}
        self._ended_at: dict[int, float] = {}
        self._end: tuple[str, str] | None = (LEFT, "")  # what to tell when this rank calls no more collectives
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="accelerate_watch", daemon=True)
        if self._rank == 0:
            self._name: str | None = announce_name(store, generation)
        else:
            self._name = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, how: str, line: str = "", may_connect: bool = True) -> None:
        """Stop the thread, and tell the others that this rank calls no more collectives.

        Args:
            how: One of the words of `judging`, and what belongs to it.
            line: The line of the program.
            may_connect: Whether to connect to the store if that was not done before.
        """
        if self._stopping.is_set():
            return
        self._end = (how, line) if may_connect or self._board is not None else None
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(SECONDS_TO_STOP)  # it tells the others, later if it is connecting
        else:
            self._tell_the_end()

    def leave(self) -> None:
        """Stop, because the process group is being closed."""
        self.stop(LEFT, stacks.position(threading.get_ident()).line)

    def close(self) -> None:
        """Remove the note of this rank: the next process group may have the same store."""
        if self._board is not None and not self._thread.is_alive():
            self._board.close()
            self._board = None

    def explain(self, seconds: float) -> str:
        """Find out which ranks have ended, for an error that follows from it.

        Args:
            seconds: How long to wait for ranks that are about to end.

        Returns:
            A sentence; empty if none is known to have ended.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                if (board := self._connected()) is None:
                    return ""
                notes = self._with_deaths(board.read())
            except StoreGoneError:
                return WITHOUT_STORE if self._rank > 0 and rank_0_has_the_store() else ""
            except Exception:
                return ""
            gone = {rank: note for rank, note in notes.items() if note.state == ENDED}
            if gone or time.monotonic() > deadline:
                return sentence(gone)
            time.sleep(TICK_SECONDS)

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # without a store nothing can be watched; a run never fails because of us
            while dist.is_initialized() and id(dist.group.WORLD) == self.group_id and not self._stopping.is_set():
                board = self._connected()
                if board is not None and not self._stopping.is_set():
                    self._tick(board)
                self._stopping.wait(TICK_SECONDS)
        self._tell_the_end()

    def _connected(self) -> Board | None:
        """The notes of all ranks; None until rank 0 has named them."""
        if self._board is None and (name := self._name or find_name(self._store, self.generation)) is not None:
            self._board = Board(tcp_store(self._store), name, self._rank, self._world)
            self._board.publish(self._note)
        return self._board

    def _tick(self, board: Board) -> None:
        now = time.monotonic()
        waited = self._waited(now)
        if now >= self._next_question:
            self._next_question = now + max(QUESTION_SECONDS, self._world / 1000)
            if line := stacks.program_line(self._watched):
                self._last_line = f"{line}, or later"
            if self._may_poll:
                self._answer(board, board.questions(), waited)
        if waited < STANDING_SECONDS:
            self._position, self._calls, self._pause = None, None, FIRST_READ_SECONDS
            return
        if self._position is None:
            self._position = stacks.position(self._watched)
            self._note = replace(self._note, stand=self._note.stand + 1)
            self._next_read = now
        if now < self._next_read:
            return
        if self._position.kind:
            self._consult(board, waited)
        elif self._rank > 0 and waited > IDLE_SECONDS and stacks.reads_standard_input(self._native_id):
            self._publish(board)
            self._answer(board, board.questions(), waited)
        fewest = self._world * self._world / READS_PER_SECOND
        self._next_read = time.monotonic() + max(self._pause, fewest)
        self._pause = min(self._pause * 1.3, LONGEST_READ_SECONDS)

    def _waited(self, now: float) -> float:
        """For how many seconds the main thread has stood at one point without CPU time."""
        cpu_seconds = stacks.cpu_seconds(self._watched) or 0.0
        computes = cpu_seconds - self._cpu_seconds > BUSY_FRACTION * (now - self._looked_at) and not self._spins
        signature = () if computes else stacks.signature(self._watched)
        if computes or signature != self._signature:
            self._stands_since = now
        self._signature, self._cpu_seconds, self._looked_at = signature, cpu_seconds, now
        return now - self._stands_since

    # ---- notes --------------------------------------------------------------------------------------------------

    def _answer(self, board: Board, questions: int, waited: float) -> None:
        if questions >= NEVER:
            self._end_with(board, board.verdict())
        if questions == self._questions:
            return
        self._questions, self._asked_at = questions, time.monotonic()
        if self._position is not None and not self._position.kind and waited > IDLE_SECONDS:
            self._look_for_asynchronous_calls()
        self._publish(board)

    def _publish(self, board: Board) -> None:
        """Publish where this rank is now."""
        position = self._position or stacks.position(self._watched)
        self._note = replace(
            self._note,
            state=STANDS if self._position is not None else RUNS,
            line=position.line,
            operation=position.operation,
            kind=position.kind,
            group=position.group,
            peer=position.peer,
            data=position.data,
            beat=self._note.beat + 1,
            reads_input=not position.kind and stacks.reads_standard_input(self._native_id),
            calls=self._calls,
            counts=count_calls() if self._calls is not None else {},
        )
        board.publish(self._note)

    def _consult(self, board: Board, waited: float) -> None:
        """Read the notes of the others, and look for a proof."""
        # The own note comes first: of two ranks that consult at once, at least one then sees both notes.
        self._publish(board)
        self._questions = board.ask()
        if self._questions >= NEVER:
            self._end_with(board, board.verdict())
        others = self._with_deaths(board.read())
        self._note_ends(others)
        # Reading torch's flight recorder costs milliseconds; notes alone rule out nearly every conflict.
        if self._calls is None and any(may_conflict(self._note, other, waited) for other in others.values()):
            self._read_calls()
            if self._calls is not None:
                self._publish(board)
        notes = {**others, self._rank: self._note}
        since_end = {rank: time.monotonic() - at for rank, at in self._ended_at.items()}
        verdict = judge(self._rank, notes, self._before, waited, since_end)
        self._before = notes
        # The main thread may have moved while notes were read; then the verdict is about a moment that has passed.
        if verdict is not None and stacks.signature(self._watched) == self._signature:
            self._decide(board, verdict, notes)

    def _note_ends(self, others: dict[int, Note]) -> None:
        """Note since when ranks have ended: a process that exits gets the time that it takes, and its exit code counts."""
        now = time.monotonic()
        for rank, note in others.items():
            if note.state != ENDED or rank in self._ended_at:
                continue
            begun = self._ending_since.setdefault(rank, now)
            is_here = note.host == self._note.host
            exits = is_running(note.process_id) if is_here else now - begun < SECONDS_TO_EXIT_ELSEWHERE
            if note.operation == LEFT or not exits or now - begun > SECONDS_TO_EXIT:
                self._ended_at[rank] = now

    def _with_deaths(self, others: dict[int, Note]) -> dict[int, Note]:
        """Mark the processes of this machine that no longer live, and have not said so."""
        return {
            rank: replace(note, state=ENDED, operation=f"{DIED} (pid {note.process_id})")
            if note.state != ENDED and note.host == self._note.host and not is_running(note.process_id)
            else note
            for rank, note in others.items()
        }

    def _read_calls(self) -> None:
        begin = time.monotonic()
        if begin < self._may_read_calls_at:
            return
        self._calls = read_calls(self._since)
        now = time.monotonic()
        self._may_read_calls_at = now + (now - begin) / CALLS_FRACTION

    def _look_for_asynchronous_calls(self) -> None:
        """Treat this rank as blocked while an earlier asynchronous collective is incomplete."""
        assert self._position is not None
        if not self._spins:
            return
        self._read_calls()
        for name, calls in (self._calls or {}).items():
            if calls.calls and not (last := calls.calls[calls.last]).is_done and len(calls.ranks) > 1:
                self._position = replace(self._position, kind="work", group=name, operation=last.name)

    def _tell_the_end(self) -> None:
        with contextlib.suppress(Exception):
            if self._end is not None and (board := self._connected()) is not None:
                self._publish_end(board, *self._end)

    def _publish_end(self, board: Board, how: str, line: str) -> None:
        calls = None
        if time.monotonic() - self._asked_at < 2 * QUESTION_SECONDS:  # somebody stands, and may want to know
            with contextlib.suppress(Exception):
                calls = read_calls(self._since)
        line = line or self._last_line
        self._note = replace(
            self._note, state=ENDED, operation=how, line=line, calls=calls, counts=count_calls(), kind="", data=""
        )
        board.publish(self._note)

    # ---- the end ------------------------------------------------------------------------------------------------

    def _decide(self, board: Board, verdict: Verdict, notes: dict[int, Note]) -> None:
        alive = sum(note.state != ENDED for note in notes.values())
        # Several ranks may come to a verdict at once: the store takes the first, which all of them then end with.
        text = json.dumps({"text": str(verdict), "host": self._note.host, "alive": alive})
        if board.decide(text):
            _show(str(verdict))
        self._end_with(board, board.verdict())

    def _end_with(self, board: Board, verdict: str) -> None:
        """End this process, together with the others."""
        stay_silent()
        said = json.loads(verdict)
        if said["host"] != self._note.host and os.environ.get("LOCAL_RANK", "0") == "0":
            _show(said["text"])
        deadline = time.monotonic() + GOODBYE_SECONDS
        with contextlib.suppress(Exception):
            board.acknowledge()
            while board.acknowledge(0) < said["alive"] and time.monotonic() < deadline:
                time.sleep(0.005)
            if self._rank == 0:  # its process may hold the store
                time.sleep(0.05)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(EXIT_CODE)  # the main thread may be blocked in a collective that nothing interrupts


def _show(verdict: str) -> None:
    """Show the verdict to the user: through the launcher, or on standard error."""
    text = f"{verdict}{HOW_TO_SWITCH_OFF}\n"
    folder = supervision_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            write_atomically(folder, REPORT, text)
            return
    with contextlib.suppress(OSError, ValueError):
        os.write(2, f"accelerate: deadlock. {text}".encode(errors="backslashreplace"))
