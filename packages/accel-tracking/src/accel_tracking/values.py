"""Converting logged values to the few types that trackers can store."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any

MAX_DEPTH = 10  # of nested dictionaries; what is deeper, or contains itself, becomes a str
MAX_ELEMENTS = 32  # arrays with more are described, not listed
MAX_CHARACTERS = 500  # of the str that describes an object


def number(value: Any) -> int | float | None:
    """A value as an int or float; None if it is not a number.

    Args:
        value: A number of any library, or a tensor or array with one element, which waits for its device.
    """
    if type(value) is float or type(value) is int:
        return value
    if isinstance(value, (int, float)):
        return float(value) if isinstance(value, float) else int(value)
    if callable(getattr(value, "item", None)):
        try:
            value = value.item()
        except (ValueError, RuntimeError, TypeError):  # more than one element
            return None
        return value if isinstance(value, (int, float)) else None
    if isinstance(value, numbers.Real):
        return float(value)
    return None


@dataclass(frozen=True, slots=True)
class Logged:
    """The values of one call of `log`, by kind.

    Attributes:
        numbers: The metrics.
        groups: Metrics that belong together: name of the group -> name -> number.
        texts: Everything else, as str.
    """

    numbers: dict[str, int | float]
    groups: dict[str, dict[str, int | float]]
    texts: dict[str, str]

    def flat(self) -> dict[str, int | float]:
        """All metrics, those of groups as `group/name`."""
        return self.numbers | {
            f"{group}/{name}": value for group, values in self.groups.items() for name, value in values.items()
        }


def sort_values(values: Mapping[Any, Any]) -> Logged:
    """Separate numbers, groups of numbers and strings.

    Names become str. In a group, what is not a number goes to `texts`, as `group/name`; nested groups are
    flattened.
    """
    sorted_ = Logged({}, {}, {})
    for name, value in values.items():
        name = str(name)
        if isinstance(value, Mapping):
            group = {}
            for inner, item in flatten(value, separator="/"):
                if (scalar := number(item)) is not None:
                    group[inner] = scalar
                else:
                    sorted_.texts[f"{name}/{inner}"] = text(item)
            if group:
                sorted_.groups[name] = group
        elif (scalar := number(value)) is not None:
            sorted_.numbers[name] = scalar
        else:
            sorted_.texts[name] = text(value)
    return sorted_


MEDIA = frozenset({"PIL", "matplotlib", "numpy", "pandas", "plotly", "torch"})
"""Libraries whose objects services can display."""


def presentable(value: Any, libraries: frozenset[str]) -> Any:
    """A value for a service that takes objects: numbers become int or float, and what it cannot display becomes a str.

    Args:
        value: What was logged.
        libraries: Top-level packages whose objects the service displays.
    """
    if (scalar := number(value)) is not None:
        return scalar
    if isinstance(value, Mapping):
        return {str(name): presentable(item, libraries) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [presentable(item, libraries) for item in value]
    if value is None or isinstance(value, str) or type(value).__module__.partition(".")[0] in libraries:
        return value
    return text(value)


def flatten(values: Mapping[Any, Any], separator: str = ".", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Names and values of a nested mapping, names joined by `separator`."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value and depth < MAX_DEPTH:
            for inner, item in flatten(value, separator, depth + 1):
                yield f"{name}{separator}{inner}", item
        else:
            yield str(name), value


def plain(value: Any, depth: int = 0) -> Any:
    """A value that JSON can hold: numbers, str, lists and dictionaries with str keys.

    Enums become their value, dataclasses and namespaces dictionaries, sets lists, small arrays lists, NaN and
    infinities the strings "NaN", "Infinity" and "-Infinity". Everything else becomes a string.
    """
    if value is None or isinstance(value, (bool, str)) and not isinstance(value, Enum):
        return value
    if isinstance(value, Enum):
        return plain(value.value, depth)
    if (scalar := number(value)) is not None:
        return scalar if math.isfinite(scalar) else non_finite(scalar)
    if depth >= MAX_DEPTH:
        return text(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif type(value).__name__ == "Namespace" and hasattr(value, "__dict__"):  # argparse, without importing it
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item, depth + 1) for name, item in value.items()}
    if isinstance(value, Set):
        return [plain(item, depth + 1) for item in sorted(value, key=repr)]
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [plain(item, depth + 1) for item in value]
    if hasattr(value, "shape") and hasattr(value, "tolist") and math.prod(value.shape) <= MAX_ELEMENTS:
        return plain(value.tolist(), depth + 1)
    return text(value)


def plain_settings(values: Any) -> dict[str, Any]:
    """A run's config as a dictionary of plain values.

    Args:
        values (mapping, dataclass or `argparse.Namespace`): The config.

    Raises:
        TypeError: For anything else.
    """
    settings = plain(values)
    if not isinstance(settings, dict):
        raise TypeError(
            f"The config of a run must be a dictionary, not {values!r} ({type(values).__name__}). Pass "
            'config={"learning_rate": ...}.'
        )
    return settings


def text(value: Any) -> str:
    """A value as a str of bounded length; never raises."""
    if isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value) if isinstance(os.fspath(value), str) else repr(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}"
    try:
        description = str(value)
    except Exception as error:
        description = f"<{type(value).__name__} whose __str__ failed: {type(error).__name__}>"
    return description if len(description) <= MAX_CHARACTERS else description[: MAX_CHARACTERS - 3] + "..."


def non_finite(value: float) -> str:
    """How NaN and the infinities are written where only finite numbers can be."""
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
