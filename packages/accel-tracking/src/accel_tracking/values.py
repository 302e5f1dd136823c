"""What users log, brought into the few forms that trackers can store."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any

MAX_DEPTH = 10  # of settings in settings; whatever is deeper, or contains itself, becomes text
MAX_ELEMENTS = 32  # arrays with more are described, not listed
MAX_CHARACTERS = 500  # of the text that stands for an object


def number(value: Any) -> int | float | None:
    """The plain number in a value, None when there is none.

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
        texts: Everything else, as strings.
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

    Names become str. In a group, what is no number is left for `texts`, as `group/name`; groups in groups are
    flattened.
    """
    sorted_ = Logged({}, {}, {})
    for name, value in values.items():
        name = str(name)
        if isinstance(value, Mapping):
            group = {}
            for inner, part in flatten(value, separator="/"):
                if (found := number(part)) is not None:
                    group[inner] = found
                else:
                    sorted_.texts[f"{name}/{inner}"] = text(part)
            if group:
                sorted_.groups[name] = group
        elif (found := number(value)) is not None:
            sorted_.numbers[name] = found
        else:
            sorted_.texts[name] = text(value)
    return sorted_


MEDIA = frozenset({"PIL", "matplotlib", "numpy", "pandas", "plotly", "torch"})
"""Libraries whose objects services draw."""


def presentable(value: Any, libraries: frozenset[str]) -> Any:
    """A value for a service that takes objects: numbers become plain, what it could not show becomes a string.

    Args:
        value: What was logged.
        libraries: Top-level packages whose objects the service shows.
    """
    if (found := number(value)) is not None:
        return found
    if isinstance(value, Mapping):
        return {str(name): presentable(part, libraries) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [presentable(part, libraries) for part in value]
    if value is None or isinstance(value, str) or type(value).__module__.partition(".")[0] in libraries:
        return value
    return text(value)


def flatten(values: Mapping[Any, Any], separator: str = ".", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Names and values of a nested mapping, names joined by `separator`."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value and depth < MAX_DEPTH:
            for inner, part in flatten(value, separator, depth + 1):
                yield f"{name}{separator}{inner}", part
        else:
            yield str(name), value


def plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON can hold it: numbers, strings, lists and dictionaries with str keys.

    Enums become their value, dataclasses and namespaces dictionaries, sets lists, small arrays lists, NaN and
    infinities the strings "NaN", "Infinity" and "-Infinity". Everything else becomes a string.
    """
    if value is None or isinstance(value, (bool, str)) and not isinstance(value, Enum):
        return value
    if isinstance(value, Enum):
        return plain(value.value, depth)
    if (found := number(value)) is not None:
        return found if math.isfinite(found) else non_finite(found)
    if depth >= MAX_DEPTH:
        return text(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif type(value).__name__ == "Namespace" and hasattr(value, "__dict__"):  # argparse, without importing it
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(name): plain(part, depth + 1) for name, part in value.items()}
    if isinstance(value, Set):
        return [plain(part, depth + 1) for part in sorted(value, key=repr)]
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [plain(part, depth + 1) for part in value]
    if hasattr(value, "shape") and hasattr(value, "tolist") and math.prod(value.shape) <= MAX_ELEMENTS:
        return plain(value.tolist(), depth + 1)
    return text(value)


def plain_settings(values: Any) -> dict[str, Any]:
    """A run's settings as a dictionary of plain values.

    Args:
        values (mapping, dataclass or `argparse.Namespace`): The settings.

    Raises:
        TypeError: For anything else.
    """
    settings = plain(values)
    if not isinstance(settings, dict):
        raise TypeError(
            f"The settings of a run are a dictionary, not {values!r} ({type(values).__name__}): pass "
            'config={"learning_rate": ...}.'
        )
    return settings


def text(value: Any) -> str:
    """A value as a text of bounded length; never fails."""
    if isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value) if isinstance(os.fspath(value), str) else repr(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}"
    try:
        said = str(value)
    except Exception as error:
        said = f"<{type(value).__name__} whose text cannot be made: {type(error).__name__}>"
    return said if len(said) <= MAX_CHARACTERS else said[: MAX_CHARACTERS - 3] + "..."


def non_finite(value: float) -> str:
    """How NaN and the infinities are written where only finite numbers can be."""
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
