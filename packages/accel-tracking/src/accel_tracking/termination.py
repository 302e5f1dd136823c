"""Callbacks before the process exits: at interpreter shutdown, after an uncaught error, or on SIGTERM.

Python runs a SIGTERM handler in the main thread, between two instructions. It may have interrupted the very library that
has to be flushed, while that held a lock; so another thread runs the callbacks, and the process exits when they are done
or after a timeout. While the main thread is in compiled code, for instance hangs in a collective with a process that has
exited, the handler does not run, and the launcher kills the process (SIGKILL) after its own timeout.
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
_owner: int | None = None  # a process id: forked processes inherit the handler, but must not flush


def add_exit_callback(call: Callable[[str | None], None]) -> None:
    """Register a function that is called once before this process exits, in the main thread or another one.

    Args:
        call: Called with the reason: an error, "SIGTERM", or None for a normal exit.
    """
    global _owner
    if _owner != os.getpid():  # also in a forked process, which has inherited the calls of another
        _calls.clear()
        _owner = os.getpid()
    if not _calls:
        atexit.register(_at_exit)
        _listen()
    _calls.append(call)


def remove_exit_callback(call: Callable[[str | None], None]) -> None:
    """Remove a function that `add_exit_callback` has added."""
    with contextlib.suppress(ValueError):
        _calls.remove(call)
    if not _calls:
        atexit.unregister(_at_exit)
        _stop_listening()


def _call_all(reason: str | None) -> None:
    while _calls:
        with contextlib.suppress(Exception):  # the process exits anyway, and the other callbacks must still run
            _calls.pop()(reason)


def _at_exit() -> None:
    if _owner != os.getpid():
        return
    error = getattr(sys, "last_value", None)
    _call_all(f"{type(error).__name__}: {error}" if error is not None else None)


# ---- SIGTERM --------------------------------------------------------------------------------------------------------


def _listen() -> None:
    """Install the handler, unless the training script has installed one."""
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
