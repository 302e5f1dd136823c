"""Giving options their values: who has the last word, and what a value may be."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from accel_cli.arguments import Option, truth
from accel_cli.errors import UsageError, did_you_mean

PRECEDENCE = ("flag", "file", "environment", "guess")


def set_value(settings: Namespace, name: str, value: Any, source: str) -> None:
    """Set an option, unless somebody who counts for more has.

    Args:
        settings: What is being resolved.
        name: The option.
        value: Its value.
        source: One of `PRECEDENCE`.
    """
    before = settings.sources.get(name)
    if before is None or PRECEDENCE.index(source) <= PRECEDENCE.index(before):
        setattr(settings, name, value)
        settings.sources[name] = source


def coerce(option: Option, value: Any, where: str) -> Any:
    """Turn a value from a file or variable into one that the flag would have given.

    Args:
        option: The row of the option.
        value: What stands there.
        where: The key or variable, for the message.

    Raises:
        ValueError: When the value is not allowed.
    """
    if option.is_switch:
        return value if isinstance(value, bool) else _converted(truth, str(value), where)
    if option.choices is not None:
        word = "no" if value is False else str(value)
        if word.lower() not in [choice.lower() for choice in option.choices]:
            hint = did_you_mean(word, list(option.choices))
            raise UsageError(f"{where}: {value!r} is not one of {', '.join(option.choices)}.{hint}")
        return word
    if isinstance(value, (list, tuple)):
        value = list(value) if option.action == "append" else ",".join(str(item) for item in value)
    if option.type is None or option.action == "append":
        return value
    if isinstance(value, bool) and option.type in (int, float):
        raise UsageError(f"{where}: {value!r} is not a number.")
    return _converted(option.type, str(value), where)


def _converted(kind: Any, text: str, where: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        name = getattr(kind, "__name__", "")
        kinds = {"int": "a whole number", "float": "a number", "three_truths": "one bool, or three (true or false)"}
        wanted = kinds.get(name, "a truth value (true or false)")
        raise UsageError(f"{where}: {text!r} is not {wanted}.") from None


def first_number(environ: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    """Return the first of several variables that holds a whole number, or `default`."""
    for name in names:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return default
