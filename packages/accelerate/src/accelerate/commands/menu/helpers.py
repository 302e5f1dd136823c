"""Writing on a terminal line by line."""

from __future__ import annotations

import shutil
import sys
from enum import Enum

TERMINAL_WIDTH = shutil.get_terminal_size().columns

CURSOR_TO_CHAR = {"UP": "A", "DOWN": "B", "RIGHT": "C", "LEFT": "D"}


class Direction(Enum):
    """A way through a menu."""

    UP = 0
    DOWN = 1


def forceWrite(content: object, end: str = "") -> None:  # noqa: N802 - the name is public interface
    """Write text at once.

    Args:
        content: What to write.
        end: What follows it.
    """
    sys.stdout.write(f"{content}{end}")
    sys.stdout.flush()


def writeColor(content: object, color: int | str, end: str = "") -> None:  # noqa: N802 - the name is public interface
    """Write text in a colour.

    Args:
        content: What to write.
        color: The number of the colour, as terminals count: 32 is green.
        end: What follows it.
    """
    forceWrite(f"\x1b[{color}m{content}\x1b[0m", end)


def reset_cursor() -> None:
    """Go to the beginning of the line."""
    forceWrite("\r")


def move_cursor(num_lines: int, direction: str) -> None:
    """Move the cursor.

    Args:
        num_lines: How far.
        direction: One of `CURSOR_TO_CHAR`, in any case.
    """
    forceWrite(f"\x1b[{num_lines}{CURSOR_TO_CHAR[direction.upper()]}")


def clear_line() -> None:
    """Empty the line, and go to its beginning."""
    forceWrite(f"\r{' ' * TERMINAL_WIDTH}\r")


def linebreak() -> None:
    """Draw a line across the terminal."""
    reset_cursor()
    forceWrite("-" * TERMINAL_WIDTH)
