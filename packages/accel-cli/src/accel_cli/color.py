"""Colour on terminals: bold headings, a red "error:", flags that stand out. Nothing elsewhere, nor with NO_COLOR."""

from __future__ import annotations

import os
import re
from typing import Any

BOLD, RED, CYAN, RESET = "\x1b[1m", "\x1b[1;31m", "\x1b[36m", "\x1b[0m"
STYLES = (
    (re.compile(r"^(accelerate[^:\n]*: )(error:)", re.MULTILINE), rf"{BOLD}\1{RESET}{RED}\2{RESET}"),
    (re.compile(r"^(usage:|[A-Za-z][^\n]*:$)", re.MULTILINE), rf"{BOLD}\1{RESET}"),
    (re.compile(r"^( {2,4})(-{1,2}\w[\w-]*(?:, -{1,2}\w[\w-]*)*)", re.MULTILINE), rf"\1{CYAN}\2{RESET}"),
)


def shows_color(stream: Any) -> bool:
    """Whether a stream is a terminal that shows colour, and nobody has asked for none (`NO_COLOR`, `TERM=dumb`)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not getattr(stream, "isatty", bool)():
        return False
    return os.name != "nt" or "WT_SESSION" in os.environ  # older consoles of Windows print the codes


def paint(text: str, stream: Any) -> str:
    """The text of an error or of `--help` as a stream shows it.

    Args:
        text: It may have several lines.
        stream: Where it will be printed.
    """
    if not shows_color(stream):
        return text
    for pattern, style in STYLES:
        text = pattern.sub(style, text)
    return text
