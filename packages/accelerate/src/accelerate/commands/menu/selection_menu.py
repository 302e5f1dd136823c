"""A menu to choose one of several texts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from accelerate.commands.menu import cursor
from accelerate.commands.menu.helpers import (
    Direction,
    clear_line,
    forceWrite,
    linebreak,
    move_cursor,
    reset_cursor,
    writeColor,
)
from accelerate.commands.menu.input import mark, mark_multiple, register
from accelerate.commands.menu.keymap import KEYMAP, key_by_key

GREEN = 32

in_colab = sys.modules.get("google.colab")  # whose cells look like a terminal and are none


@register
class BulletMenu:
    """A list with an arrow that moves up and down.

    Args:
        prompt: The question above it; nothing when None.
        choices: What to choose from.

    Example:
        ```py
        index = BulletMenu("Which one?", ["this", "that"]).run(default_choice=1)
        ```
    """

    position: int
    choices: Sequence[str]
    prompt: str | None
    arrow_char: str

    key_handler: dict[int, Any]
    handle_input: Any

    def __init__(self, prompt: str | None = None, choices: Sequence[str] = []) -> None:
        self.position = 0
        self.choices = choices
        self.prompt = prompt
        self.arrow_char = "*" if os.name == "nt" else "➔ "

    def write_choice(self, index: int, end: str = "") -> None:
        """Write one of the choices, in green where the terminal has colours."""
        if os.name == "nt":
            forceWrite(self.choices[index], end)
        else:
            writeColor(self.choices[index], GREEN, end)

    def print_choice(self, index: int) -> None:
        """Write the line of one of the choices, with the arrow where it is."""
        if index == self.position:
            forceWrite(f" {self.arrow_char} ")
            self.write_choice(index)
        else:
            forceWrite(f"    {self.choices[index]}")
        reset_cursor()

    def move_direction(self, direction: Direction, num_spaces: int = 1) -> None:
        """Move the arrow, unless that would be outside of the list."""
        before = self.position
        after = before + (num_spaces if direction is Direction.DOWN else -num_spaces)
        if not 0 <= after < len(self.choices):
            return
        self.position = after
        clear_line()
        self.print_choice(before)
        move_cursor(num_spaces, direction.name)
        self.print_choice(after)

    @mark(KEYMAP["up"])
    def move_up(self) -> None:
        """Move the arrow up by one."""
        self.move_direction(Direction.UP)

    @mark(KEYMAP["down"])
    def move_down(self) -> None:
        """Move the arrow down by one."""
        self.move_direction(Direction.DOWN)

    @mark(KEYMAP["newline"])
    def select(self) -> int:
        """Go below the list, and return the number of the choice with the arrow."""
        move_cursor(len(self.choices) - self.position, "DOWN")
        return self.position

    @mark(KEYMAP["interrupt"])
    def interrupt(self) -> None:
        """Go below the list, and end as ctrl-C does."""
        move_cursor(len(self.choices) - self.position, "DOWN")
        raise KeyboardInterrupt

    @mark_multiple(*(KEYMAP[str(digit)] for digit in range(10)))
    def select_row(self) -> None:
        """Move the arrow to the choice whose number was typed."""
        row = int(chr(self.current_selection))  # type: ignore[attr-defined]
        distance = row - self.position
        if distance and row < len(self.choices):
            self.move_direction(Direction.DOWN if distance > 0 else Direction.UP, abs(distance))

    def run(self, default_choice: int = 0) -> int:
        """Show the menu and wait until something is chosen.

        Args:
            default_choice: Where the arrow is at first.

        Returns:
            The number of the choice, from 0. Without a terminal a number is read as a line; nothing, or nonsense,
            stands for `default_choice`.

        Raises:
            KeyboardInterrupt: For ctrl-C.
        """
        if self.prompt:
            linebreak()
            forceWrite(self.prompt, "\n")
        self.position = default_choice
        if in_colab or not sys.stdin.isatty():
            return self._read_number(default_choice)
        with cursor.hide(), key_by_key():
            self._show()
            while (chosen := self.handle_input()) is None:
                pass
        reset_cursor()
        for _ in range(len(self.choices) + 1):
            move_cursor(1, "UP")
            clear_line()
        self.write_choice(chosen, "\n")
        return int(chosen)

    def _show(self) -> None:
        forceWrite("Choose with the arrow keys or a number, then press Enter\n")
        for index in range(len(self.choices)):
            self.print_choice(index)
            forceWrite("\n")
        move_cursor(len(self.choices) - self.position, "UP")

    def _read_number(self, default_choice: int) -> int:
        for index, choice in enumerate(self.choices):
            forceWrite(f"  {index}  {choice}", "\n")
        text = input(f"Choice [{default_choice}]: ").strip()
        return int(text) if text.isdecimal() and int(text) < len(self.choices) else default_choice
