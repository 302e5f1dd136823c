"""Ending this process with the verdict: its main thread may be blocked in a collective that nothing interrupts."""

from __future__ import annotations

import contextlib
import os
import sys

from accel_state.supervision import REPORT, supervision_folder, write_atomically

EXIT_CODE = 1
HOW_TO_SWITCH_OFF = (
    "Set ACCELERATE_WATCH_RANKS=0 (accelerate launch --no_watch_ranks) to wait for the timeout instead."
)


def show(verdict: str) -> None:
    """Show the verdict to the user: through the launcher, or on standard error."""
    text = f"{verdict}{HOW_TO_SWITCH_OFF}\n"
    folder = supervision_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            write_atomically(folder, REPORT, text)
            return
    with contextlib.suppress(OSError, ValueError):
        os.write(2, f"accelerate: deadlock. {text}".encode(errors="backslashreplace"))


def end() -> None:
    """End the process at once. What the program has printed is written."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(EXIT_CODE)
