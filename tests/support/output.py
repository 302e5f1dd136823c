"""What processes print."""

from __future__ import annotations

GLOO = ("[Gloo]", "is connected to", "Expected number of connected")


def without_gloo(printed: str) -> list[str]:
    """The lines without those of gloo: torch 2.9 prints one a rank, now and then into one another."""
    return [line for line in printed.splitlines() if not any(words in line for words in GLOO)]


def own_lines(printed: str) -> list[str]:
    """The lines that are not empty, without those of gloo."""
    return [line for line in without_gloo(printed) if line]
