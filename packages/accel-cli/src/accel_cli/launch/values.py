"""Parsing and checking values from config files and environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_cli.arguments import Flag
from accel_cli.errors import UsageError, did_you_mean
from accel_cli.extensions import brings
from accel_state.settings.option import BOOLEAN

# equivalent spellings
SAME = {"1": "true", "yes": "true", "on": "true", "0": "false", "no": "false", "off": "false"}


def coerce(option: Flag, value: Any, where: str) -> Any:
    """Convert a value from a file or variable to the type that the flag has.

    Args:
        option: The row of the option.
        value: The value in the file or variable.
        where: The key or variable, for the message.

    Raises:
        ValueError: The value is not valid.
    """
    if option.is_switch:
        return value if isinstance(value, bool) else _converted(BOOLEAN.parse, option, str(value), where)
    if option.choices is not None:
        word = "no" if value is False else str(value)
        known = word.lower() in [choice.lower() for choice in option.choices]
        if not known and not brings(option.kind.brought_by, word):
            hint = did_you_mean(word, list(option.choices))
            raise UsageError(f"{where}: {value!r} is not one of {', '.join(option.choices)}.{hint}")
        return word
    if isinstance(value, (list, tuple)):
        value = list(value) if option.action == "append" else ",".join(str(item) for item in value)
    if option.action == "append":
        return value
    if isinstance(value, bool) and option.type in (int, float):
        raise UsageError(f"{where}: {value!r} is not {option.kind.expected}.")
    return _converted(option.type, option, str(value), where)


def _converted(read: Any, option: Flag, text: str, where: str) -> Any:
    try:
        return read(text)
    except ValueError:
        raise UsageError(f"{where}: {text!r} is not {option.kind.expected}.") from None


def check_choice(option: Flag, value: Any, where: str) -> None:
    """Check that a value is one of an option's choices, ignoring case.

    Args:
        option: The row. One without a closed list of choices may have any value.
        value: The value; None and "" are not checked.
        where: The file, line and key, or the flag, for the message.

    Raises:
        ValueError: The value is not one of them.
    """
    checked_before = option.kind.exact or option.is_switch
    if checked_before or not option.kind.closed or value is None or value == "":
        return
    words = option.kind.choices
    spelling = str(value).lower()
    allowed = [word.lower() for word in words]
    if spelling not in allowed and SAME.get(spelling) not in allowed:
        hint = did_you_mean(spelling.upper() if words[-1].isupper() else spelling, list(words))
        raise UsageError(f"{where}: {value!r} is not one of {', '.join(words)}.{hint}")


def first_number(environ: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    """Return the first of several variables that holds an integer, or `default`."""
    for name in names:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return default
