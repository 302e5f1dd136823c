"""The watcher of this process: it begins with the default process group, and ends with it or with the process."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import traceback

import torch.distributed as dist

from accel_ops.watch.calls import start_recorder
from accel_ops.watch.judging import FINISHED, LEFT, RAISED, explain_errors
from accel_ops.watch.notes import tcp_store
from accel_ops.watch.watcher import Watcher
from accel_state import shutdown, stacks
from accel_state.environment import parse_flag_from_env

VARIABLE = "ACCELERATE_WATCH_RANKS"

_current: Watcher | None = None
_is_prepared = False


def prepare() -> None:
    """Have torch record what ranks call, unless `ACCELERATE_WATCH_RANKS` says no; before a process group is made."""
    if parse_flag_from_env(VARIABLE, default=True):
        start_recorder()


def begin(since_nanoseconds: int | None = None) -> None:
    """Watch this rank of the default process group, unless `ACCELERATE_WATCH_RANKS` says no; may be called again.

    Args:
        since_nanoseconds: When the group began to be made, as in `time.time_ns`; None where the program made it.

    Groups of one rank, and those whose store is not reached through TCP, are not watched.
    """
    global _current
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    if not parse_flag_from_env(VARIABLE, default=True):
        return
    if _current is not None and _current.group_id == id(dist.group.WORLD):
        return
    store = dist.distributed_c10d._get_default_store()
    if tcp_store(store) is None:
        return
    since = generation = 0
    if _current is not None:
        generation = _current.generation + 1
        since = time.time_ns() if since_nanoseconds is None else since_nanoseconds
        _current.stop(LEFT, may_connect=False)  # its store may be gone, now that the others are in another group
        _current.close()
    _prepare_process()
    with contextlib.suppress(RuntimeError, OSError):  # no store: nothing to watch with
        _current = Watcher(store, generation, since)
        shutdown.on_close(_current.leave)
        _current.start()


def explain(seconds: float = 1.0) -> str:
    """Say which ranks have ended, for an error that follows from it; empty if none is known to have."""
    return _current.explain(seconds) if _current is not None else ""


def _prepare_process() -> None:
    global _is_prepared
    if not _is_prepared:
        _is_prepared = True
        atexit.register(_at_exit)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_forget)
        explain_errors(explain)


def _at_exit() -> None:
    if _current is None:
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        _current.stop(FINISHED)
        return
    frames = traceback.extract_tb(error.__traceback__)
    lines = [(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(frames)]
    _current.stop(f"{RAISED} {type(error).__name__}", stacks.line_of(lines))


def _forget() -> None:
    """In a forked child: the thread is not there, and the connection is the parent's."""
    global _current
    if _current is not None:
        shutdown._keep_for_ever(_current)
        _current = None
