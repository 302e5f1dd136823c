"""Options: dataclass fields that know their environment variable, flag, allowed values and help text.

A value given in code wins over the environment variable, which wins over the fallback. Whatever is wrong is reported in
one form: the key (field or variable), the value seen, what is allowed, and the closest allowed spelling.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from typing import Any

from accel_state.environment import str_to_bool
from accel_state.guessing import closest

_METADATA_KEY = "option"
_making_defaults: ContextVar[bool] = ContextVar("making_defaults", default=False)


def wrong_value(key: str, value: object, expected: str, choices: Iterable[str] = ()) -> ValueError:
    """Build the error for a setting that cannot be used.

    Args:
        key: Field (`"DataLoaderConfiguration.even_batches"`) or environment variable that holds the value.
        value: What was found.
        expected: What is allowed, completing "expected ...".
        choices: Allowed words, from which the closest one is proposed.

    Returns:
        The error, for the caller to raise.
    """
    message = f"{key}={value!r} is not valid: expected {expected}."
    close = closest(str(value), choices)
    return ValueError(f"{message} Did you mean {close!r}?" if close else message)


@dataclass(frozen=True, slots=True)
class Kind:
    """What values a field takes, and how they are read from text."""

    expected: str
    """Completes the sentence "expected ..."."""
    parse: Callable[[str], Any]
    """From text to the value; raises `ValueError` for text that does not say one."""
    accepts: Callable[[Any], bool]
    """Whether a value is usable."""
    choices: tuple[str, ...] = ()
    """The words to choose from, where there is a list of them."""
    convert: Callable[[Any], Any] = lambda value: value
    """From another type that can only mean one value, such as 1 for true; the rest comes back as it is."""

    def read(self, key: str, value: Any) -> Any:
        """Turn what was given under `key` into the field's value.

        Raises:
            ValueError: Naming key, value and what is allowed.
        """
        try:
            parsed = self.parse(value) if isinstance(value, str) else self.convert(value)
        except (ValueError, OverflowError):
            raise wrong_value(key, value, self.expected, self.choices) from None
        if not self.accepts(parsed):
            raise wrong_value(key, value, self.expected, self.choices)
        return parsed


def is_truth_value(value: object) -> bool:
    """Whether `value` is true or false of Python or NumPy, some versions of which count them as numbers."""
    return isinstance(value, bool) or type(value).__name__ in {"bool", "bool_"}


def is_whole(value: object) -> bool:
    """Whether `value` is an integer of any library, but no truth value."""
    if is_truth_value(value):
        return False
    with suppress(TypeError):
        operator.index(value)  # type: ignore[arg-type]
        return True
    return False


def is_number(value: object) -> bool:
    """Whether `value` is an integer or a float, but no truth value."""
    return is_whole(value) or isinstance(value, float)


def as_boolean(value: Any) -> Any:
    """1, 0 and NumPy's truth values as those of Python."""
    if is_whole(value) and operator.index(value) in (0, 1):
        return bool(operator.index(value))
    return bool(value) if is_truth_value(value) else value


def as_whole(value: Any) -> Any:
    """2.0 as 2."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _parse_words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


BOOLEAN = Kind(
    "true or false", lambda text: bool(str_to_bool(text)), lambda value: isinstance(value, bool), convert=as_boolean
)
WHOLE = Kind("a whole number", int, is_whole, convert=as_whole)
NUMBER = Kind("a number", float, is_number)
TEXT = Kind("text", str, lambda value: isinstance(value, str))
PATH = Kind("a path", str, lambda value: isinstance(value, (str, os.PathLike)))
MAPPING = Kind("a dictionary", TEXT.parse, lambda value: isinstance(value, dict))
FUNCTION = Kind("a function", TEXT.parse, callable)


def at_least(lowest: int) -> Kind:
    """Whole numbers from `lowest` on."""
    return Kind(
        f"a whole number of at least {lowest}",
        int,
        lambda value: is_whole(value) and operator.index(value) >= lowest,
        convert=as_whole,
    )


def above(bound: float, *, below: float = float("inf")) -> Kind:
    """Numbers between `bound` and `below`, both excluded."""
    expected = f"a number above {bound:g}" + (f" and below {below:g}" if below != float("inf") else "")
    return Kind(expected, float, lambda value: is_number(value) and bound < value < below)


def words_of(meaning: str) -> Kind:
    """Lists of words, written in text with commas between them."""
    return Kind(
        f"a list of {meaning}",
        _parse_words,
        lambda value: isinstance(value, (list, tuple, set)) and all(isinstance(word, str) for word in value),
    )


def one_of(*choices: str) -> Kind:
    """One of several words; in whatever case it is written, the value is the word as listed here."""
    canonical = {choice.lower(): choice for choice in choices}

    def parse(text: str) -> str:
        if text.lower() not in canonical:
            raise ValueError(text)
        return canonical[text.lower()]

    return Kind(f"one of {_listing(choices)}", parse, lambda value: isinstance(value, str), choices)


def suggested(*choices: str) -> Kind:
    """Any text; `choices` are only what the command line proposes."""
    return Kind("text", str, lambda value: isinstance(value, str), choices)


def member_of(enum: type[Enum]) -> Kind:
    """A member of `enum`, or its value in any case."""
    members = {str(member.value).lower(): member for member in enum}

    def parse(text: str) -> Enum:
        if text.lower() not in members:
            raise ValueError(text)
        return members[text.lower()]

    choices = tuple(str(member.value) for member in enum)
    return Kind(f"one of {_listing(choices)}", parse, lambda value: isinstance(value, enum), choices)


def _listing(choices: Iterable[str]) -> str:
    return ", ".join(repr(choice) for choice in choices)


@dataclass(frozen=True, slots=True)
class Option:
    """What is known of one field besides its name and type; stored in the field's metadata."""

    kind: Kind
    env: str | None
    flag: str | None
    help: str
    fallback: Any

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words, empty where any value of the kind will do."""
        return self.kind.choices


def option(
    default: Any = None,
    *,
    kind: Kind | None = None,
    env: str | None = None,
    flag: str | None = None,
    help: str = "",
    choices: Iterable[str] = (),
    fallback: Any = None,
    factory: Callable[[], Any] | None = None,
) -> Any:
    """Declare a dataclass field that is an option.

    Args:
        default: The field's default, as the signature shows it. `None` stands for "not given".
        kind: What values it takes; text unless `choices` say otherwise.
        env: Environment variable asked when no value is given.
        flag: Flag of `accelerate launch` that sets the variable.
        help: One line on what the option does.
        choices: Short for `kind=one_of(*choices)`.
        fallback: The value when neither code nor environment gives one; `default` when left out.
        factory: Makes the default, where it is mutable.

    Returns:
        A `dataclasses.field`.
    """
    words = tuple(choices)
    row = Option(
        kind=kind or (one_of(*words) if words else TEXT),
        env=env,
        flag=flag,
        help=help,
        fallback=default if fallback is None else fallback,
    )
    if factory is not None:
        return field(default_factory=factory, metadata={_METADATA_KEY: row})
    return field(default=default, metadata={_METADATA_KEY: row})


def options_of(settings: Any) -> dict[str, Option]:
    """The options of a settings class or object by field name, in the order of the fields."""
    return {row.name: row.metadata[_METADATA_KEY] for row in fields(settings) if _METADATA_KEY in row.metadata}


def resolve_options(settings: Any, names: Iterable[str] | None = None) -> None:
    """Give options their values: as given in code, else from the environment, else the fallback.

    Args:
        settings: A dataclass object; its fields are set in place.
        names: The fields to resolve; all options when None.

    Raises:
        ValueError: For the first value that is not allowed, naming it and where it came from.
    """
    wanted = None if names is None else set(names)
    for row in fields(settings):
        known: Option | None = row.metadata.get(_METADATA_KEY)
        if known is None or (wanted is not None and row.name not in wanted):
            continue
        value, key = getattr(settings, row.name), f"{type(settings).__name__}.{row.name}"
        if value is None:
            value, key = _from_environment(known), known.env or key
        if value is None:
            value = known.fallback if row.default_factory is MISSING else row.default_factory()
        if value is not None:
            setattr(settings, row.name, known.kind.read(key, value))


def _from_environment(known: Option) -> str | None:
    text = None if known.env is None or _making_defaults.get() else os.environ.get(known.env)
    if text is not None and text.lower() == "none" and known.kind is not TEXT and "none" not in known.choices:
        return None  # launchers write str(None) for what nobody asked for
    return text


@contextmanager
def making_defaults() -> Iterator[None]:
    """Within the block, settings are made only to be compared with: as if no environment variable were set."""
    token = _making_defaults.set(True)
    try:
        yield
    finally:
        _making_defaults.reset(token)


def is_making_defaults() -> bool:
    """Whether a settings object is being made only to be compared with, so that it should not warn."""
    return _making_defaults.get()
