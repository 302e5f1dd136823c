"""Signals that the launcher gets: which ones the processes get too, and the exit status of a run that one ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

ENDING = ("SIGTERM", "SIGHUP", "SIGQUIT")  # whoever sends one wants the run to end
NOTICES = ("SIGUSR1", "SIGUSR2")  # a script may do as it likes, and go on


@contextmanager
def handled(handlers: Mapping[str, Callable[[int], None]]) -> Iterator[None]:
    """Handle signals within a `with` block, by the names that this system has.

    Outside of the main thread, where Python handles none, nothing is done.
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
    """The exit status of a run that was sent a signal: the script's own where it chose one, as with one process.

    Args:
        number: The signal.
        codes: How the processes ended, by rank, as `subprocess.Popen.returncode` says it.
        crashed: Ranks that ended with an exception, perhaps only because they lost the others.

    Returns:
        The status that the lowest rank chose; 0 when all of them ended well; 1 when an exception ended one and the
        signal none; else 128 and the number of the signal.
    """
    chosen = [code for rank, code in sorted(codes.items()) if code > 0 and rank not in crashed]
    if chosen:
        return chosen[0]
    if not codes or min(codes.values()) < 0:
        return 128 + number
    return max(codes.values())
