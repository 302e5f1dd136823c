"""Reading single keys."""

from __future__ import annotations

import os
import string
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ARROW_KEY_FLAG = 1 << 8  # told apart by it from the letters that arrows send

KEYMAP: dict[str, int] = {
    "tab": ord("\t"),
    "newline": ord("\r"),
    "esc": 27,
    "up": ord("A") + ARROW_KEY_FLAG,
    "down": ord("B") + ARROW_KEY_FLAG,
    "right": ord("C") + ARROW_KEY_FLAG,
    "left": ord("D") + ARROW_KEY_FLAG,
    "mod_int": ord("["),
    "undefined": sys.maxsize,
    "interrupt": 3,
    "insert": ord("2"),
    "delete": ord("3"),
    "pg_up": ord("5"),
    "pg_down": ord("6"),
}
KEYMAP["arrow_begin"], KEYMAP["arrow_end"] = KEYMAP["up"], KEYMAP["left"]
KEYMAP |= {digit: ord(digit) for digit in string.digits}

# what Windows sends for the arrows, and what other terminals send for the same
WINDOWS_ARROWS = {"H": "A", "P": "B", "M": "C", "K": "D"}


def get_raw_chars() -> str:
    """Wait for a key, and return the first character that it sends; nothing of it is shown."""
    return _windows_char() if os.name == "nt" else _char()


def get_character() -> str | int:
    """Wait for a key.

    Returns:
        Its character; for arrows a character with `ARROW_KEY_FLAG`; `KEYMAP["undefined"]` for anything that cannot be
        printed.
    """
    char = get_raw_chars()
    if ord(char) in (KEYMAP["interrupt"], KEYMAP["newline"]):
        return char
    if ord(char) == KEYMAP["esc"]:
        if ord(get_raw_chars()) != KEYMAP["mod_int"]:
            return KEYMAP["undefined"]
        arrow = ord(get_raw_chars()) + ARROW_KEY_FLAG
        return chr(arrow) if KEYMAP["arrow_begin"] <= arrow <= KEYMAP["arrow_end"] else KEYMAP["undefined"]
    return char if char in string.printable else KEYMAP["undefined"]


@contextmanager
def key_by_key() -> Iterator[None]:
    """Set the terminal to pass every key at once and unchanged, without echo; typed keys are not lost."""
    if os.name == "nt":
        yield
        return
    import termios

    terminal = sys.stdin.fileno()
    before, now = termios.tcgetattr(terminal), termios.tcgetattr(terminal)
    now[0] &= ~termios.ICRNL
    now[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
    termios.tcsetattr(terminal, termios.TCSADRAIN, now)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _char() -> str:
    with key_by_key():
        char = os.read(sys.stdin.fileno(), 1).decode(errors="replace")
    if not char:
        raise EOFError("The terminal was closed.")
    return char


_sent: list[str] = []


def _windows_char() -> str:
    import msvcrt

    if _sent:
        return _sent.pop(0)
    char: str = msvcrt.getwch()  # type: ignore[attr-defined]
    if char in ("\x00", "\xe0"):
        arrow = WINDOWS_ARROWS.get(msvcrt.getwch())  # type: ignore[attr-defined]
        _sent.extend(["[", arrow] if arrow else ["?"])
        return chr(KEYMAP["esc"])
    return char
