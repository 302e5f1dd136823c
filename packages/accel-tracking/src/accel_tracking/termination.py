"""A last call before the process ends: at the end of the interpreter, after an error, or when SIGTERM comes.

SIGTERM is answered in the main thread, between two instructions of Python. It may have interrupted the very library that has
to be flushed, while that held a lock; so another thread does the work, and the process ends when it is done or its time
is up. While the main thread waits in compiled code, for instance in a collective for a process that is gone, nothing of
this happens, and the process ends when the launcher's patience does (SIGKILL).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable

SECONDS_TO_FLUSH = 10.0  # launchers and schedulers send SIGKILL some 30 seconds after SIGTERM

_calls: list[Callable[[str | None], None]] = []
_owner: int | None = None  # a process id: forked processes inherit the handler, but are not ours to flush


def add_last_call(call: Callable[[str | None], None]) -> None:
    """Have a function called once before this process ends, in the main thread or another one.

    Args:
        call: Takes why the process ends: an error, "SIGTERM", or None when nothing is wrong.
    """
    global _owner
    if _owner != os.getpid():  # also in a forked process, which has inherited the calls of another
        _calls.clear()
        _owner = os.getpid()
    if not _calls:
        atexit.register(_at_exit)
        _listen()
    _calls.append(call)


def remove_last_call(call: Callable[[str | None], None]) -> None:
    """Take back `add_last_call`."""
    with contextlib.suppress(ValueError):
        _calls.remove(call)
    if not _calls:
        atexit.unregister(_at_exit)
        _stop_listening()


def _call_all(reason: str | None) -> None:
    while _calls:
        with contextlib.suppress(Exception):  # the process ends anyway, and the others are still to be called
            _calls.pop()(reason)


def _at_exit() -> None:
    if _owner != os.getpid():
        return
    error = getattr(sys, "last_value", None)
    _call_all(f"{type(error).__name__}: {error}" if error is not None else None)


# ---- SIGTERM --------------------------------------------------------------------------------------------------------


def _listen() -> None:
    """Install the handler, unless the program has one of its own."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _stop_listening() -> None:
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_sigterm(signal_number: int, frame: object) -> None:
    if _owner == os.getpid():
        flushing = threading.Thread(target=_call_all, args=("SIGTERM",), name="accel-tracking-flush", daemon=True)
        flushing.start()
        flushing.join(SECONDS_TO_FLUSH)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
