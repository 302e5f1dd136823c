"""Tables for people, in plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def create_ascii_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], title: str) -> str:
    """Draw a table.

    Args:
        headers: One for each column.
        rows: One value for each column.
        title: Above the table.
    """
    lines = [list(map(str, line)) for line in (headers, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    widths[-1] += max(0, len(title) + 2 - (sum(widths) + len(widths) - 1))
    bars = ["─" * width for width in widths]
    head, *body = ("│" + "│".join(map(str.center, line, widths)) + "│" for line in lines)
    return "\n".join([
        "┌" + "─".join(bars) + "┐",
        "│" + title.center(sum(widths) + len(widths) - 1) + "│",
        "├" + "┬".join(bars) + "┤",
        head,
        "├" + "┼".join(bars) + "┤",
        *body,
        "└" + "┴".join(bars) + "┘",
    ])  # fmt: skip
