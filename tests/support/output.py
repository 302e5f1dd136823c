"""What processes print."""

from __future__ import annotations

import re

GLOO = "[Gloo]"
PARTS = re.compile(r"\[Gloo\] Rank|is connected to|peer ranks\b\.?|Expected number of connected|is :")


def without_gloo(printed: str) -> list[str]:
    """The lines without those of gloo.

    That of torch 2.9 prints one a rank and group, in seven writes, which those of another rank cut anywhere: what is
    left of such a line may be a number, or nothing.
    """
    lines = printed.splitlines()
    return [line for line in lines if not _is_of_gloo(line)] if GLOO in printed else lines


def own_lines(printed: str) -> list[str]:
    """The lines that are not empty, without those of gloo."""
    return [line for line in without_gloo(printed) if line]


def _is_of_gloo(line: str) -> bool:
    left, parts = PARTS.subn("", line)
    return not left.strip(" 0123456789") if parts else line.isdigit()
