"""What processes print."""

from __future__ import annotations


def own_lines(printed: str) -> list[str]:
    """The lines that are not empty, without those of gloo: torch 2.9 prints one a rank, now and then one into another."""
    return [line for line in printed.splitlines() if line and not line.startswith("[Gloo]")]
