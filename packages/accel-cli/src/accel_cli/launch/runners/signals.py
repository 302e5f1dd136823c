"""Signals: which ones the launcher forwards to the processes, and the exit status of a run that a signal ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

ENDING = ("SIGTERM", "SIGHUP", "SIGQUIT")  # these end the run
NOTICES = ("SIGUSR1", "SIGUSR2")  # a script may handle these and continue


@contextmanager
def handled(handlers: Mapping[str, Callable[[int], None]]) -> Iterator[None]:
    """Handle signals within a `with` block; names that this system does not have are ignored.

    Does nothing outside of the main thread, where Python handles no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}
    try:
        for name, handler in handlers.items():
            if number := getattr(signal, name, None):
                before[number] = signal.signal(number, _as_python_calls_it(handler))
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _as_python_calls_it(handler: Callable[[int], None]) -> Callable[[int, Any], None]:
    return lambda number, _: handler(number)


def status_after(number: int, codes: Mapping[int, int], crashed: Container[int]) -> int:
    """The exit status of a run that got a signal: the script's own if it chose one, as with one process.

    Args:
        number: The signal.
        codes: Exit codes by rank, as in `subprocess.Popen.returncode`.
        crashed: Ranks that ended with an exception, perhaps only because other ranks had ended.

    Returns:
        The status of the lowest rank that chose one; 0 if all succeeded; 1 if an exception ended one and the signal
        none; else 128 plus the number of the signal.
    """
    chosen = [code for rank, code in sorted(codes.items()) if code > 0 and rank not in crashed]
    if chosen:
        return chosen[0]
    if not codes or min(codes.values()) < 0:
        return 128 + number
    return max(codes.values())
