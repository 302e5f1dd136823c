"""The commands, flags and values of all commands, as functions of a shell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from accel_cli.completion.words import Words

HINT_LENGTH = 60  # characters; terminals are not wide


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a shell writes a function that prints lines, depending on its first argument.

    Attributes:
        head: Begins the function; `{name}` stands for its name.
        case: One value of the argument, and the command that prints; `{value}` and `{print}`.
        foot: Ends the function.
        quote: Quotes a `str`.
        hints: Whether completions have descriptions.
    """

    head: str
    case: str
    foot: str
    quote: Callable[[str], str]
    hints: bool

    def function(self, name: str, rows: Iterable[tuple[str, list[str]]]) -> str:
        """Write a function.

        Args:
            name: Its name.
            rows: Argument and the lines to print. Those without lines are left out.
        """
        cases = [
            self.case.format(value=self.quote(value), print="printf '%s\\n' " + " ".join(map(self.quote, lines)))
            for value, lines in rows
            if lines
        ]
        return "\n".join([self.head.format(name=name), *cases, self.foot])


def tables(words: list[Words], dialect: Dialect) -> str:
    """Write the functions that a completion script calls.

    Args:
        words: Those of all commands.
        dialect: How the shell writes.

    Returns:
        `_accelerate_commands COMMAND`, `_accelerate_flags COMMAND`, `_accelerate_argument COMMAND`,
        `_accelerate_runs_another COMMAND` and `_accelerate_values "COMMAND FLAG"`, which print a word on each line.
    """

    def hinted(word: str, hint: str) -> str:
        return f"{word}\t{_short(hint)}" if dialect.hints and hint else word

    return "\n\n".join([
        dialect.function("_accelerate_commands", (
            (row.path, [hinted(name, hint) for name, hint in row.commands.items()]) for row in words
        )),
        dialect.function("_accelerate_flags", (
            (row.path, [hinted(flag.spelling, flag.help) for flag in row.flags]) for row in words
        )),
        dialect.function("_accelerate_argument", ((row.path, list(row.argument)) for row in words)),
        dialect.function("_accelerate_runs_another", ((row.path, ["yes"] * row.runs_another) for row in words)),
        dialect.function("_accelerate_values", _values(words)),
    ])  # fmt: skip


def _values(words: list[Words]) -> Iterator[tuple[str, list[str]]]:
    for row in words:
        for flag in row.flags:
            yield f"{row.path} {flag.spelling}".strip(), list(flag.values)


def _short(text: str) -> str:
    """Truncate a help text."""
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= HINT_LENGTH else text[: HINT_LENGTH - 3].rsplit(" ", 1)[0] + "..."
