"""Options: where a value comes from, and how a wrong one is reported."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_state.settings.option import (
    BOOLEAN,
    INTEGER,
    MAPPING,
    NUMBER,
    PATH,
    TEXT,
    above,
    at_least,
    making_defaults,
    member_of,
    one_of,
    option,
    options_of,
    resolve_options,
    suggested,
    words_of,
    wrong_value,
)


class Colour(Enum):
    RED = "red"
    GREEN = "green"


@dataclass
class Brush:
    width: int = option(None, kind=at_least(1), env="BRUSH_WIDTH", flag="--width", help="In pixels.", fallback=3)
    colour: Colour = option(None, kind=member_of(Colour), env="BRUSH_COLOUR", fallback=Colour.RED)
    style: str = option("round", choices=("round", "flat"))
    soft: bool = option(None, kind=BOOLEAN, env="BRUSH_SOFT")
    label: str | None = option(None, kind=TEXT, env="BRUSH_LABEL")
    extras: dict[str, Any] = option(kind=MAPPING, factory=dict)
    note: Any = None

    def __post_init__(self) -> None:
        resolve_options(self)


def test_code_wins_over_environment_which_wins_over_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (Brush().width, Brush().colour, Brush().style, Brush().soft) == (3, Colour.RED, "round", None)
    monkeypatch.setenv("BRUSH_WIDTH", "7")
    monkeypatch.setenv("BRUSH_COLOUR", "GREEN")
    monkeypatch.setenv("BRUSH_SOFT", "yes")
    assert (Brush().width, Brush().colour, Brush().soft) == (7, Colour.GREEN, True)
    assert Brush(width=9).width == 9


def test_text_given_in_code_is_read_like_the_variable() -> None:
    brush = Brush(width="4", colour="Green", soft="off", style="FLAT")  # type: ignore[arg-type]
    assert (brush.width, brush.colour, brush.soft, brush.style) == (4, Colour.GREEN, False, "flat")


def test_the_word_none_in_a_variable_means_unset_except_for_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRUSH_WIDTH", "None")
    monkeypatch.setenv("BRUSH_LABEL", "None")
    assert (Brush().width, Brush().label) == (3, "None")


def test_mutable_defaults_are_not_shared_and_none_means_the_default() -> None:
    first, second = Brush(), Brush(extras=None)  # type: ignore[arg-type]
    first.extras["a"] = 1
    assert second.extras == {}


def test_errors_name_key_value_and_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^Brush\.width=0 is not valid: expected an integer of at least 1\.$"):
        Brush(width=0)
    with pytest.raises(ValueError, match=r"Brush\.style='flatt' .* one of 'round', 'flat'\. Did you mean 'flat'\?"):
        Brush(style="flatt")
    monkeypatch.setenv("BRUSH_COLOUR", "grene")
    with pytest.raises(ValueError, match=r"^BRUSH_COLOUR='grene' .* Did you mean 'green'\?"):
        Brush()


def test_defaults_can_be_made_without_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRUSH_WIDTH", "7")
    with making_defaults():
        assert Brush().width == 3
    assert Brush().width == 7


def test_options_can_be_listed_from_the_class() -> None:
    known = options_of(Brush)
    assert list(known) == ["width", "colour", "style", "soft", "label", "extras"]
    width = known["width"]
    assert (width.flag, width.env, width.help, width.fallback) == ("--width", "BRUSH_WIDTH", "In pixels.", 3)
    assert known["colour"].choices == ("red", "green")


@pytest.mark.parametrize(
    ("kind", "value", "wanted"),
    [
        (INTEGER, "-3", -3),
        (INTEGER, 5, 5),
        (INTEGER, 2.0, 2),
        (at_least(2), 4.0, 4),
        (BOOLEAN, 1, True),
        (BOOLEAN, np.bool_(False), False),
        (NUMBER, "1e-3", 0.001),
        (NUMBER, 2, 2),
        (above(0, below=1), 0.5, 0.5),
        (PATH, Path("a"), Path("a")),
        (words_of("names"), " a, b ,", ["a", "b"]),
        (words_of("names"), ("a",), ("a",)),
        (suggested("x"), "anything", "anything"),
        (one_of("A"), "a", "A"),
        (member_of(Colour), Colour.RED, Colour.RED),
    ],
)
def test_values_that_are_taken(kind: Any, value: Any, wanted: Any) -> None:
    assert kind.read("key", value) == wanted


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (INTEGER, "x"),
        (INTEGER, 2.5),
        (INTEGER, True),
        (NUMBER, True),
        (NUMBER, "three"),
        (BOOLEAN, 2),
        (BOOLEAN, 1.0),
        (BOOLEAN, ""),
        (above(0), 0),
        (above(0, below=1), 1),
        (at_least(2), "1"),
        (PATH, 3),
        (MAPPING, "a"),
        (words_of("names"), [1]),
        (one_of("A"), 3),
        (member_of(Colour), "blue"),
    ],
)
def test_values_that_are_refused(kind: Any, value: Any) -> None:
    with pytest.raises(ValueError, match="^key="):
        kind.read("key", value)


def test_nothing_is_proposed_when_nothing_is_close() -> None:
    assert "Did you mean" not in str(wrong_value("key", "zzz", "one of 'red'", ["red"]))
