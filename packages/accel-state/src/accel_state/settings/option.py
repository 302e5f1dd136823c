"""Options: dataclass fields with an environment variable, a flag, allowed values and a help text.

A value given in code wins over the environment variable, which wins over the fallback. Whatever is wrong is reported in
one form: the key (field or variable), the value seen, what is allowed, and the closest allowed spelling.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import MISSING, field, fields
from enum import Enum
from typing import Any, NamedTuple

from accel_state.environment import str_to_bool
from accel_state.guessing import closest

_METADATA_KEY = "option"
SAME = object()
"""Stands for "the fallback", where None has a meaning of its own."""
_making_defaults: ContextVar[bool] = ContextVar("making_defaults", default=False)


def wrong_value(key: str, value: object, expected: str, choices: Iterable[str] = ()) -> ValueError:
    """Build the error for a setting that cannot be used.

    Args:
        key: Field (`"DataLoaderConfiguration.even_batches"`) or environment variable that holds the value.
        value: What was found.
        expected: What is allowed, completing "expected ...".
        choices: Allowed values as str, from which the closest one is proposed.

    Returns:
        The error, for the caller to raise.
    """
    message = f"{key}={value!r} is not valid: expected {expected}."
    close = closest(str(value), choices)
    return ValueError(f"{message} Did you mean {close!r}?" if close else message)


class Kind(NamedTuple):
    """Which values an option takes: in code, in an environment variable, on the command line and in a config file."""

    expected: str
    """Completes the sentence "expected ..."."""
    parse: Callable[[str], Any]
    """From a str to the value; raises `ValueError` for a str that is not one."""
    accepts: Callable[[Any], bool]
    """Whether a value is usable."""
    choices: tuple[str, ...] = ()
    """The allowed values as str, where there is a list of them."""
    convert: Callable[[Any], Any] = lambda value: value
    """Converts another type that can only mean one value, such as 1 for True; other values are returned unchanged."""
    closed: bool = False
    """Whether a str must be one of `choices`, in any case."""
    exact: bool = False
    """Whether a flag takes `choices` only, spelled as they are listed."""
    brought_by: str = ""
    """The group of entry points whose names are further values, added by other packages; read for an unknown value."""
    metavar: str | None = None
    """Placeholder for a value in `--help`."""
    limits: tuple[float | None, float | None] = (None, None)
    """The smallest and the largest number, where there are limits."""
    canonical: Callable[[str], str] | None = None
    """From a value to its spelling in a variable; when None, values of a closed list in lower case are lower case."""

    def spell(self, value: Any) -> str:
        """The str of a value in the environment variable."""
        text = str(value)
        if self.canonical is not None:
            return self.canonical(text)
        in_lower_case = self.closed and all(choice == choice.lower() for choice in self.choices)
        return text.lower() if in_lower_case and isinstance(value, str) else text

    def read(self, key: str, value: Any) -> Any:
        """Convert the value of `key` to the field's value.

        Raises:
            ValueError: Naming key, value and what is allowed.
        """
        try:
            parsed = self.convert(self.parse(value) if isinstance(value, str) else value)
        except (ValueError, OverflowError):
            raise wrong_value(key, value, self.expected, self.choices) from None
        if not self.accepts(parsed):
            raise wrong_value(key, value, self.expected, self.choices)
        return parsed


def is_bool(value: object) -> bool:
    """Whether `value` is a bool of Python or NumPy, some versions of which count them as numbers."""
    return isinstance(value, bool) or type(value).__name__ in {"bool", "bool_"}


def is_integer(value: object) -> bool:
    """Whether `value` is an integer of any library, but not a bool."""
    if is_bool(value):
        return False
    with suppress(TypeError):
        operator.index(value)  # type: ignore[arg-type]
        return True
    return False


def is_number(value: object) -> bool:
    """Whether `value` is an integer or a float, but not a bool."""
    return is_integer(value) or isinstance(value, float)


def as_bool(value: Any) -> Any:
    """Convert 1, 0 and NumPy's bools to bool; other values are returned unchanged."""
    if is_integer(value) and operator.index(value) in (0, 1):
        return bool(operator.index(value))
    return bool(value) if is_bool(value) else value


def as_integer(value: Any) -> Any:
    """Convert a float such as 2.0 to int; other values are returned unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _parse_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_bool(text: str) -> bool:
    """Read yes, true, on, 1 and their opposites; `bool("false")` would be True."""
    return bool(str_to_bool(text))


parse_bool.__name__ = "bool"  # argparse puts this name into its error message

BOOLEAN = Kind(
    "true or false",
    parse_bool,
    lambda value: isinstance(value, bool),
    ("true", "false"),
    convert=as_bool,
    closed=True,
    metavar="BOOL",
)
INTEGER = Kind("an integer", int, is_integer, convert=as_integer, metavar="N")
NUMBER = Kind("a number", float, is_number, metavar="X")
TEXT = Kind("a str", str, lambda value: isinstance(value, str))
PATH = Kind("a path", str, lambda value: isinstance(value, (str, os.PathLike)), metavar="PATH")
MAPPING = Kind("a dictionary", TEXT.parse, lambda value: isinstance(value, dict))
FUNCTION = Kind("a function", TEXT.parse, callable)


def at_least(lowest: int) -> Kind:
    """Integers from `lowest` on."""
    return Kind(
        f"an integer of at least {lowest}",
        int,
        lambda value: is_integer(value) and operator.index(value) >= lowest,
        convert=as_integer,
        metavar="N",
        limits=(lowest, None),
    )


def above(bound: float, *, below: float = float("inf")) -> Kind:
    """Numbers between `bound` and `below`, both excluded."""
    expected = f"a number above {bound:g}" + (f" and below {below:g}" if below != float("inf") else "")
    return Kind(expected, float, lambda value: is_number(value) and bound < value < below, metavar="X")


def words_of(meaning: str) -> Kind:
    """Lists of str; given as one str, the items are separated by commas."""
    return Kind(
        f"a list of {meaning}",
        _parse_names,
        lambda value: isinstance(value, (list, tuple, set)) and all(isinstance(name, str) for name in value),
        metavar="NAMES",
    )


def one_of(*choices: str, exact: bool = True) -> Kind:
    """One of several strings, in any case; the value is spelled as listed here.

    Args:
        *choices: The allowed values.
        exact: Whether a flag takes them only in the case in which they are listed.
    """
    canonical = {choice.lower(): choice for choice in choices}

    def parse(text: str) -> str:
        if text.lower() not in canonical:
            raise ValueError(text)
        return canonical[text.lower()]

    expected = f"one of {listing(choices)}"
    metavar = None if exact else "NAME"
    return Kind(
        expected, parse, lambda value: isinstance(value, str), choices, closed=True, exact=exact, metavar=metavar
    )


def suggested(*choices: str, exact: bool = False) -> Kind:
    """Any str; `choices` are only what the command line proposes, or takes if `exact`."""
    return Kind("a str", str, lambda value: isinstance(value, str), choices, exact=exact)


def member_of(enum: type[Enum]) -> Kind:
    """A member of `enum`, or its value in any case."""
    members = {str(member.value).lower(): member for member in enum}

    def parse(text: str) -> Enum:
        if text.lower() not in members:
            raise ValueError(text)
        return members[text.lower()]

    choices = tuple(str(member.value) for member in enum)
    return Kind(f"one of {listing(choices)}", parse, lambda value: isinstance(value, enum), choices)


def listing(choices: Iterable[str]) -> str:
    """Choices as an error message lists them."""
    return ", ".join(repr(choice) for choice in choices)


class Option(NamedTuple):
    """The description of one option besides its name and type; stored in the field's metadata."""

    kind: Kind
    env: str | None
    flag: str | None
    help: str
    fallback: Any
    key: str = ""
    launch_default: Any = SAME
    as_text: bool = False
    switch: bool = False

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values as str, empty where any value of the kind will do."""
        return self.kind.choices

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables of the value; several hold the items of a sequence."""
        return tuple((self.env or "").split())


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
    key: str = "",
    launch_default: Any = SAME,
    as_text: bool = False,
    switch: bool = False,
) -> Any:
    """Declare a dataclass field that is an option.

    A field with a flag or a key is an option of `accelerate launch`, too: `OptionGroup.from_settings` builds its row in
    the command line, the config file, the questionnaire and the environment of the launched processes from it.

    Args:
        default: The field's default, as the signature shows it. `None` stands for "not given".
        kind: Which values it takes; a str without `kind` and `choices`.
        env: Environment variable that is read when no value is given. Several, separated by spaces, hold one item of a
            sequence each.
        flag: Flag of `accelerate launch` that sets the variable; several spellings, separated by spaces, of which the
            last one names the option in config files.
        help: One line on what the option does.
        choices: Short for `kind=one_of(*choices)`.
        fallback: The value when neither code nor environment gives one; `default` when left out.
        factory: Makes the default, where it is mutable.
        key: Name in config files of an option that has no flag.
        launch_default: The value that `accelerate launch` sets by default, where that is not the fallback;
            None does not set the variable.
        as_text: Whether `accelerate launch` passes the given str instead of the parsed value.
        switch: Whether the flag takes no value and means True.

    Returns:
        A `dataclasses.field`.
    """
    listed = tuple(choices)
    row = Option(
        kind=kind or (one_of(*listed) if listed else TEXT),
        env=env,
        flag=flag,
        help=help,
        fallback=default if fallback is None else fallback,
        key=key,
        launch_default=launch_default,
        as_text=as_text,
        switch=switch,
    )
    if factory is not None:
        return field(default_factory=factory, metadata={_METADATA_KEY: row})
    return field(default=default, metadata={_METADATA_KEY: row})


def options_of(settings: Any) -> dict[str, Option]:
    """The options of a settings class or object by field name, in the order of the fields."""
    return {row.name: row.metadata[_METADATA_KEY] for row in fields(settings) if _METADATA_KEY in row.metadata}


def resolve_options(settings: Any, names: Iterable[str] | None = None) -> None:
    """Set options to their values: as given in code, else from the environment, else the fallback.

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
    if _making_defaults.get():
        return None
    if len(known.variables) > 1:  # those that are not set have the items of the fallback
        texts = [os.environ.get(name) for name in known.variables]
        if not any(texts):
            return None
        return ",".join(text or str(item) for text, item in zip(texts, known.fallback, strict=True))
    text = None if known.env is None else os.environ.get(known.env)
    if text is not None and text.lower() == "none" and known.kind is not TEXT and "none" not in known.choices:
        return None  # launchers write str(None) for an option that was not given
    return text


@contextmanager
def making_defaults() -> Iterator[None]:
    """A context in which settings are created only for comparison: as if no environment variable were set."""
    token = _making_defaults.set(True)
    try:
        yield
    finally:
        _making_defaults.reset(token)


def is_making_defaults() -> bool:
    """Whether a settings object is being created only for comparison, so that it should not warn."""
    return _making_defaults.get()
