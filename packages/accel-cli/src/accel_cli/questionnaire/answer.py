"""Kinds of answers, and how typed text is parsed to a value."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import override

from accel_cli.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable


YES = ("yes", "y", "true", "1")
NO = ("no", "n", "false", "0")


class Asks(Protocol):
    """An object that can ask the user, such as `prompts.Prompts`."""

    def ask_text(self, text: str, default: str, read: Callable[[str], Any]) -> Any:
        """Ask for a text."""
        ...

    def ask_truth(self, text: str, default: str, read: Callable[[str], Any]) -> Any:
        """Ask for yes or no."""
        ...

    def ask_choice(self, text: str, choice: Choice, default: str, read: Callable[[str], Any]) -> Any:
        """Ask for one of several values."""
        ...


class Answer(ABC):
    """A kind of answer."""

    @abstractmethod
    def read(self, text: str) -> Any:
        """Parse typed text to a value.

        Raises:
            ValueError: It is not valid; the message has the reason.
        """

    def spell(self, value: Any) -> str:
        """Convert a value to text that `read` parses."""
        return str(value)

    def ask(self, prompts: Asks, text: str, default: str, read: Callable[[str], Any]) -> Any:
        """Ask the user.

        Args:
            prompts: The object that asks.
            text: The question.
            default: The value of an empty answer; empty if there is no default.
            read: Parses the typed text, or raises `ValueError` with the reason.
        """
        return prompts.ask_text(text, default, read)


@dataclass(frozen=True, slots=True)
class Choice(Answer):
    """One of a few values.

    Attributes:
        options: Pairs of a value and its label in the menu.
    """

    options: tuple[tuple[Any, str], ...]

    @property
    def numbers(self) -> list[str]:
        """The text to type for each option: the value itself if all are ints, else indices from 0."""
        values = [value for value, _ in self.options]
        return [str(value) for value in (values if all(isinstance(v, int) for v in values) else range(len(values)))]

    @property
    def labels(self) -> list[str]:
        """The labels of the menu."""
        return [label for _, label in self.options]

    @override
    def read(self, text: str) -> Any:
        """Accept a number of the menu, a value or its label, ignoring case."""
        values = [value for value, _ in self.options]
        for words in (self.numbers, [str(value) for value in values], self.labels):
            lower = [word.lower() for word in words]
            if text.lower() in lower:
                return values[lower.index(text.lower())]
        words = [str(value) for value in values]
        listing = ", ".join(f"{number} ({word})" if number != word else word
                            for number, word in zip(self.numbers, words, strict=True))  # fmt: skip
        raise ValueError(f"{text!r} is not one of {listing}.{did_you_mean(text, words)}")

    @override
    def spell(self, value: Any) -> str:
        """The label of a value."""
        return next(label for option, label in self.options if option == value)

    @override
    def ask(self, prompts: Asks, text: str, default: str, read: Callable[[str], Any]) -> Any:
        """Ask with a menu."""
        return prompts.ask_choice(text, self, default, read)


def choice(*values: Any, **labels: str) -> Choice:
    """Make a choice of values that are their own labels.

    Args:
        *values: The values.
        **labels: Labels of values that need another one.
    """
    return Choice(tuple((value, labels.get(str(value), str(value))) for value in values))


@dataclass(frozen=True, slots=True)
class Truth(Answer):
    """Yes or no."""

    @override
    def read(self, text: str) -> bool:
        """Accept yes and no, and other words for them."""
        if text.lower() in (*YES, *NO):
            return text.lower() in YES
        raise ValueError(f"{text!r} is neither yes nor no.")

    @override
    def spell(self, value: Any) -> str:
        """Write yes or no."""
        return "yes" if value else "no"

    @override
    def ask(self, prompts: Asks, text: str, default: str, read: Callable[[str], Any]) -> Any:
        """Let somebody confirm."""
        return prompts.ask_truth(text, default, read)


@dataclass(frozen=True, slots=True)
class Number(Answer):
    """A number.

    Attributes:
        least: The smallest that is allowed.
        most: The largest.
        is_integer: Whether it must be an integer.
    """

    least: float | None = None
    most: float | None = None
    is_integer: bool = True

    @override
    def read(self, text: str) -> float:
        """Accept a number within the limits."""
        try:
            value = int(text) if self.is_integer else float(text)
        except ValueError:
            kind = "an integer" if self.is_integer else "a number"
            raise ValueError(f"{text!r} is not {kind}.") from None
        if self.least is not None and not value >= self.least:  # so that nan is rejected, too
            raise ValueError(f"It must be at least {self.least}, got {text}.")
        if self.most is not None and not value <= self.most:
            raise ValueError(f"It must be at most {self.most}, got {text}.")
        return value


@dataclass(frozen=True, slots=True)
class Text(Answer):
    """Any text.

    Attributes:
        without_blanks: Whether blanks are rejected, as in addresses and names.
    """

    without_blanks: bool = False

    @override
    def read(self, text: str) -> str:
        """Accept text without control characters."""
        if not text.isprintable():
            raise ValueError(f"{text!r} has characters that cannot be printed.")
        if self.without_blanks and len(text.split()) > 1:
            raise ValueError(f"{text!r} must not contain blanks.")
        return text


@dataclass(frozen=True, slots=True)
class Path(Text):
    """A file or folder."""

    @override
    def read(self, text: str) -> str:
        """Accept text, and expand `~`."""
        return os.path.expanduser(Text.read(self, text))


@dataclass(frozen=True, slots=True)
class Words(Answer):
    """Several words with a separator.

    Attributes:
        pattern: A regular expression for each; empty for anything.
        example: A description of the pattern, for messages.
        separator: The separator.
    """

    pattern: str = ""
    example: str = ""
    separator: str = ","

    @override
    def read(self, text: str) -> list[str]:
        """Accept at least one text."""
        import re

        words = [word.strip() for word in text.split(self.separator) if word.strip()]
        if not words:
            raise ValueError(f"{text!r} is empty.")
        for word in words:
            if self.pattern and not re.fullmatch(self.pattern, word):
                raise ValueError(f"{word!r} does not look like {self.example}.")
            if not word.isprintable():
                raise ValueError(f"{word!r} has characters that cannot be printed.")
        return words

    @override
    def spell(self, value: Any) -> str:
        """Join them again."""
        return self.separator.join(value)


@dataclass(frozen=True, slots=True)
class Joined(Words):
    """Several words that become one `str`, separated by commas."""

    @override
    def read(self, text: str) -> str:  # type: ignore[override]
        return ",".join(Words.read(self, text))

    @override
    def spell(self, value: Any) -> str:
        """Write the text as it is."""
        return str(value)
