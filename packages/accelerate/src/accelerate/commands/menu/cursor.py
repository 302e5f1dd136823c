"""Hiding and showing the terminal's cursor."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


def hide_cursor() -> None:
    """Hide the cursor."""
    _send("\x1b[?25l")


def show_cursor() -> None:
    """Show the cursor."""
    _send("\x1b[?25h")


@contextmanager
def hide() -> Iterator[None]:
    """Hide the cursor in a block, and show it again whatever happens there."""
    try:
        hide_cursor()
        yield
    finally:
        show_cursor()


def _send(code: str) -> None:
    sys.stdout.write(code)
    sys.stdout.flush()
