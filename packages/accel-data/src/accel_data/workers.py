"""A loader's workers: how they are started, and their random states, for datasets that draw random numbers (augmentation).

Resumed workers continue the random streams of the interrupted ones. So each worker sends its random states with a
batch, once reading changes them; a checkpoint stores those after the batches that were yielded, and the workers of the
resumed epoch begin with them, in the same turn. A stream is read again from its start, with the states from there.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from accel_data.samplers import IndicesAhead
from accel_data.torchdata_state import reads_from_start
from accel_ops.random import capture_cpu_rng_state, restore_rng_state, same_rng_states
from accel_state.logging import get_logger
from accel_state.supervision import HANG_TIMEOUT

logger = get_logger(__name__)

SILENT_SECONDS = 60.0
"""How long workers may take to their first batch before a warning."""
STACK_DELAY_SECONDS = 1.0
"""How long after the warning a worker prints its stack."""
FORK_MAY_DEADLOCK = sys.version_info < (3, 11, 10)
"""Whether a forked process may stand still before any of its code runs: https://github.com/python/cpython/issues/112275"""


def wait_for_idle_threads(seconds: float = 0.1) -> None:
    """Wait until all other threads of this process sleep, on Linux.

    Called before a fork where `FORK_MAY_DEADLOCK`: the new process hangs if another thread was creating a thread state at that
    moment, without the GIL. Those of gloo do when they release the tensors of a collective that has just ended.

    Args:
        seconds: How long to wait at most.
    """
    end = time.monotonic() + seconds
    while another_thread_runs() and time.monotonic() < end:
        time.sleep(0.001)  # and release the GIL, which such a thread needs next


def another_thread_runs() -> bool:
    """Whether a thread of this process, other than this one, is running or waiting for memory; False without /proc."""
    with suppress(OSError):
        return any(map(_runs, set(os.listdir("/proc/self/task")) - {str(threading.get_native_id())}))
    return False


def _runs(thread: str) -> bool:
    with suppress(OSError):  # it has just ended
        # "<thread id> (<name>) <state> ...", where R is running and D waits for memory
        return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(") ")[2][0] in "RD"
    return False


def seconds_of_patience() -> float:
    """How long to wait for the first batch before a warning; less than a launcher that ends the run waits."""
    with suppress(KeyError, ValueError):
        return min(SILENT_SECONDS, 0.5 * float(os.environ[HANG_TIMEOUT]))
    return SILENT_SECONDS


@contextmanager
def awaited_first_batch() -> Iterator[None]:
    """A context in which workers are to deliver their first batch; if it lasts too long, a warning names their processes."""
    seconds = seconds_of_patience()
    timer = threading.Timer(seconds, _warn_of_silence, (seconds,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _warn_of_silence(seconds: float) -> None:
    workers = [f"{process.name} (pid {process.pid})" for process in multiprocessing.active_children()]
    logger.warning(
        "The workers of a data loader have delivered no batch for %g s. They are among %s. Each prints its stack; of one that cannot, "
        "`py-spy dump --native --pid PID` shows it. A worker that hangs at its start has often inherited a lock that a thread held: start "
        "workers with DataLoader(multiprocessing_context='forkserver'), or load in the dataset's __getitem__ what uses threads.",
        seconds,
        ", ".join(workers) or "processes that have ended",
    )


def stack_unless_done() -> threading.Timer:
    """In a worker that begins: a timer that prints its stack just after the warning, to be cancelled when the first batch is read."""
    # Not by faulthandler.dump_traceback_later: in a forked process it hangs, if the parent has begun one.
    timer = threading.Timer(seconds_of_patience() + STACK_DELAY_SECONDS, _print_stack)
    timer.daemon = True
    timer.start()
    return timer


def _print_stack() -> None:
    if sys.__stderr__ is not None:
        with suppress(OSError, ValueError):  # it is no file
            faulthandler.dump_traceback(file=sys.__stderr__)


RAISED_IN_WORKER = "in DataLoader worker process"
"""What torch writes into errors of datasets and collators."""
STATES_KEY = "workers"
"""Of the random states that a batch is read from, as a checkpoint has them."""


class WorkerStates:
    """In the process of the program: the random states of each worker after the batches that were yielded.

    Attributes:
        states: Worker to its random states, by generator; of generators that reading changed.
        next_worker: Which worker has the next turn.
        num_workers: How many there are; 0 before any was started.
        are_alive: Whether persistent workers were started, which the next epoch goes on with.
        were_alive: The same when the epoch under way began.
    """

    def __init__(self) -> None:
        self.states: dict[int, dict[str, Any]] = {}
        self.next_worker = 0
        self.num_workers = 0
        self.are_alive = self.were_alive = False
        self._batches: int | None = None  # after which the states are those of a checkpoint
        self._at_start: dict[int, dict[str, Any]] = {}  # of the epoch under way
        self._is_stream = False
        self._told: dict[int, bytes] = {}
        self._ahead: list[tuple[int, bytes | None]] = []

    def begin(self, source: Any, continues_after: int | None, *, at_position: bool | None) -> None:
        """Begin an epoch, or continue one from a checkpoint.

        Args:
            source: The loader that is read.
            continues_after: How many batches of the restored epoch come before; None for an epoch that begins.
            at_position: Whether torchdata's loader begins at the position that was saved; None for a loader of torch's.
        """
        self.settle()  # of an epoch that was left
        saved_after, self._batches = self._batches, None
        if continues_after is None:
            self.were_alive = self.are_alive
        self._is_stream = isinstance(source.dataset, IterableDataset)
        self._decode()
        fits = continues_after == saved_after if at_position is None else at_position
        if continues_after is None or saved_after is None or not fits:
            self.next_worker = 0
            if not source.persistent_workers or continues_after is not None:
                self.states = {}
            self._at_start = self.states

    def note(self, worker: int, told: bytes | None) -> None:
        """Note what a worker sent with a batch that is read ahead."""
        self._ahead.append((worker, told))

    def settle(self) -> None:
        """What was read ahead is yielded."""
        for worker, told in self._ahead:
            self.next_worker = (worker + 1) % self.num_workers
            if told is not None:
                self._told[worker] = told
        self._ahead = []

    def state_dict(self, batches: int | None) -> dict[str, Any]:
        """Plain data; empty where nothing needs to be restored.

        Args:
            batches: How many batches of the epoch were yielded; None (or 0) where the next epoch begins with those workers
                that stay alive.
        """
        self._decode()
        batches = batches or self._batches  # loaded, and not iterated since
        if not self.num_workers or not (batches or self.are_alive):
            return {}
        from_start = {"at_start": self._at_start} if batches and self._is_stream else {}
        return from_start | {
            "batches": batches,
            "states": self.states,
            "next_worker": self.next_worker if batches else 0,
            "num_workers": self.num_workers,
            "were_alive": self.were_alive if batches else self.are_alive,
        }

    def _decode(self) -> None:
        self.states = self.states | {worker: pickle.loads(told) for worker, told in self._told.items()}
        self._told = {}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> WorkerStates:
        """What `state_dict` described, for workers that are to be started."""
        workers = cls()
        workers.states = dict(state["states"])
        workers._is_stream = "at_start" in state
        workers._at_start = dict(state.get("at_start", workers.states))
        workers.next_worker, workers.num_workers = state["next_worker"], state["num_workers"]
        workers.were_alive = workers.are_alive = state["were_alive"]
        workers._batches = state["batches"]
        return workers

    def read(self, source: Any, indices: IndicesAhead | None, *, runs_ahead: bool) -> Iterator[Any]:
        """Iterate a loader with workers, and note what they send with each batch.

        Args:
            source: A `torch.utils.data.DataLoader` with workers.
            indices: What it reads by, where they take turns; None for a loader that finds its position itself.
            runs_ahead: Whether batches are read before they are yielded; `settle` says then when they are.

        Returns:
            An iterator of its batches, over a loader that has started to read.
        """
        self._decode()
        fits = self.num_workers == source.num_workers
        reads_again = reads_from_start(source)
        states = (self._at_start if reads_again else self.states) if fits else {}
        turns = 0
        if fits and indices is not None and getattr(source, "in_order", True):
            turns = indices.empty_first = self.next_worker
        if reads_again:  # and sends what it read from there on
            self.states = self._at_start
        self.num_workers = source.num_workers
        if indices is not None and not self.are_alive and getattr(source, "_iterator", None) is not None:
            source._iterator = (
                None  # persistent workers that a program has started itself tell nothing: others take their place
            )
        if FORK_MAY_DEADLOCK:
            wait_for_idle_threads()
        with _telling_workers(source, states, draws_no_seed=self.were_alive):
            batches = iter(source)
        self.are_alive = bool(source.persistent_workers)
        return self._told_batches(batches, turns, runs_ahead)

    def _told_batches(self, batches: Iterator[Any], turns: int, runs_ahead: bool) -> Iterator[Any]:
        with awaited_first_batch():
            for _ in range(turns):
                _drop_empty(batches)
            item = next(batches, None)
        while item is not None:
            batch, worker, told = item
            self.note(worker, told)
            if not runs_ahead:
                self.settle()
            yield batch
            item = next(batches, None)


def _drop_empty(batches: Iterator[Any]) -> None:
    """Drop an empty batch, or the error of a dataset that cannot read one; a worker that died is no such error."""
    try:
        next(batches, None)
    except Exception as error:
        if RAISED_IN_WORKER not in str(error):
            raise
        # torch's frame that raised it has it as a variable: a cycle, which would keep the iterator until a collection, in
        # which its queues go first; persistent workers then hear of no end and are waited for, 5 s each
        error.__traceback__ = None


class StateReportingWorker:
    """In a worker: reads as it would, and sends its random states with each batch once reading has changed them.

    Args:
        collate_fn: That of the loader.
        worker_init_fn: As above.
        states: Worker to the random states that it begins with.
    """

    def __init__(
        self,
        collate_fn: Callable[[Any], Any],
        worker_init_fn: Callable[[int], None] | None,
        states: dict[int, dict[str, Any]],
    ) -> None:
        self._collate_fn = collate_fn
        self._worker_init_fn = worker_init_fn
        self._states = states
        self._start: dict[str, Any] = {}
        self._drawn: set[str] = set()
        self._stack: Timer | None = None

    def begin(self, worker: int) -> None:
        """Takes the place of `worker_init_fn`."""
        self._stack = stack_unless_done()
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker)
        states = self._states.get(worker, {})
        restore_rng_state(states)
        self._start, self._drawn = capture_cpu_rng_state(), set(states)

    def collate(self, samples: Any) -> tuple[Any, int, bytes | None]:
        """Takes the place of `collate_fn`: the batch, the worker, and its pickled random states; None for no change."""
        batch = self._collate_fn(samples)
        if self._stack is not None:
            self._stack.cancel()
            self._stack = None
        info = get_worker_info()
        assert info is not None
        now = capture_cpu_rng_state()
        unknown = now.keys() - self._drawn
        self._drawn |= {name for name in unknown if not same_rng_states(self._start[name], now[name])}
        drawn = {name: now[name] for name in self._drawn}
        return batch, info.id, pickle.dumps(drawn) if drawn else None


@contextmanager
def _telling_workers(source: Any, states: dict[int, dict[str, Any]], *, draws_no_seed: bool) -> Iterator[None]:
    """A context in which the workers of a loader are started as `StateReportingWorker`.

    Args:
        source: The loader.
        states: Worker to the random states that it begins with.
        draws_no_seed: Leave the random numbers of this process alone: in the run that is continued these workers were alive,
            and torch draws a seed whenever it starts some.
    """
    originals = source.collate_fn, source.worker_init_fn, source.generator
    worker = StateReportingWorker(originals[0], originals[1], states)
    source.collate_fn, source.worker_init_fn = worker.collate, worker.begin
    if draws_no_seed and getattr(source, "_iterator", None) is None:
        source.generator = torch.Generator()
    try:
        yield
    finally:
        source.collate_fn, source.worker_init_fn, source.generator = originals
