"""Asking the user: with menus on a terminal, with plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TextIO

from typing_extensions import override

from accel_cli.errors import UsageError
from accel_cli.questionnaire.answer import Choice

Read = Callable[[str], Any]


class Prompts(ABC):
    """Asks the user. Every question is repeated until `read` accepts the answer."""

    def say(self, line: str) -> None:
        """Show a line."""
        print(line, flush=True)

    def again(self, reason: object) -> None:
        """Show why a question is repeated."""
        self.say(f"  {reason}")

    @abstractmethod
    def ask_text(self, text: str, default: str, read: Read) -> Any:
        """Ask for a text.

        Args:
            text: The question.
            default: The value of an empty answer; empty if there is no default.
            read: Parses the typed text, or raises `ValueError` with the reason.
        """

    @abstractmethod
    def ask_truth(self, text: str, default: str, read: Read) -> Any:
        """Ask for yes or no; arguments as in `ask_text`."""

    @abstractmethod
    def ask_choice(self, text: str, choice: Choice, default: str, read: Read) -> Any:
        """Ask for one of several values; arguments as in `ask_text`."""


class PlainPrompts(Prompts):
    """Asks in plain lines and reads plain lines: for pipes, logs and simple terminals."""

    @override
    def ask_text(self, text: str, default: str, read: Read) -> Any:
        """Ask in one line."""
        return self._ask(f"{text} [{default}]: " if default else f"{text}: ", read)

    @override
    def ask_truth(self, text: str, default: str, read: Read) -> Any:
        """Ask in one line; yes and no may be abbreviated."""
        return self._ask(f"{text} (yes/no) [{default}]: " if default else f"{text} (yes/no): ", read)

    @override
    def ask_choice(self, text: str, choice: Choice, default: str, read: Read) -> Any:
        """Show a numbered list; a number, a value or a label may be typed."""
        self.say(text)
        for number, label in zip(choice.numbers, choice.labels, strict=True):
            self.say(f"  {number}  {label}")
        return self._ask(f"Choice [{default}]: " if default else "Choice: ", read)

    def _ask(self, prompt: str, read: Read) -> Any:
        while True:
            try:
                line = input(prompt)
            except (EOFError, OSError, RuntimeError, UnicodeDecodeError):  # at its end, closed, or not text
                print(flush=True)
                raise UsageError(
                    f"There is no answer to {prompt.strip().rstrip(':')!r}. Nothing was written."
                ) from None
            if not is_terminal(sys.stdin):  # a terminal has shown it already
                self.say(line)
            try:
                return read(line)
            except ValueError as reason:
                self.again(reason)


class TerminalPrompts(Prompts):
    """Asks with menus that are controlled by the arrow keys."""

    @override
    def ask_text(self, text: str, default: str, read: Read) -> Any:
        """Ask in one line; errors are shown below it."""
        import questionary

        def problem(line: str) -> bool | str:
            try:
                read(line)
            except ValueError as reason:
                return str(reason)
            return True

        hint = f"({default})" if default else None
        return read(questionary.text(text, instruction=hint, validate=problem).unsafe_ask())

    @override
    def ask_truth(self, text: str, default: str, read: Read) -> Any:
        """Ask for one key: y or n."""
        import questionary

        return self._until(
            lambda: "yes" if questionary.confirm(text, default=default == "yes").unsafe_ask() else "no", read
        )

    @override
    def ask_choice(self, text: str, choice: Choice, default: str, read: Read) -> Any:
        """Show a menu."""
        import questionary

        return self._until(
            lambda: str(questionary.select(text, choices=choice.labels, default=default or None).unsafe_ask()), read
        )

    def _until(self, ask: Callable[[], str], read: Read) -> Any:
        while True:
            try:
                return read(ask())
            except ValueError as reason:
                self.again(reason)


def choose_prompts() -> Prompts:
    """Choose menus on a terminal that can show them."""
    can_show = os.name == "nt" or os.environ.get("TERM", "dumb") != "dumb"
    at_terminal = is_terminal(sys.stdin) and is_terminal(sys.stdout)
    return TerminalPrompts() if can_show and at_terminal and find_spec("questionary") else PlainPrompts()


def is_terminal(stream: TextIO | None) -> bool:
    """True for a stream that somebody sits at."""
    return stream is not None and stream.isatty()
