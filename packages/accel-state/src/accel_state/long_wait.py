"""A line about a wait that lasts: for whom a process waits, and until when."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Timer

PATIENCE_SECONDS = 20.0
"""How long a wait may last without a message."""


class LongWait:
    """Says once, when a wait has lasted for `PATIENCE_SECONDS`, for whom this process waits.

    Args:
        say: Prints a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._timer: Timer | None = None

    def begin(self, whom: Callable[[], str], limit_seconds: float) -> None:
        """Note that the wait has begun, unless it has before.

        Args:
            whom: For whom; asked when the line is printed. Empty to say nothing.
            limit_seconds: After which the wait is an error.
        """
        if self._timer is not None:
            return
        until = time.time() + limit_seconds

        def tell() -> None:
            if name := whom():
                clock = time.strftime("%H:%M:%S", time.localtime(until))
                self._say(f"waiting for {name}, until {clock} ({limit_seconds:.0f} s from the start of the wait).")

        self._timer = Timer(PATIENCE_SECONDS, tell)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """Note that the wait is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
