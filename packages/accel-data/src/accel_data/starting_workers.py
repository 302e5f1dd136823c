"""Starting the workers of a loader: no thread may be caught in the middle of a fork, and workers that stand still are told of."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
