"""Functions of this package that programs replace from outside, under the path at which another package offers them.

Such a package registers where the function is found; calls inside this package then look it up there each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_lookups: dict[str, Callable[[], Callable[..., Any]]] = {}


def register_lookup(name: str, find: Callable[[], Callable[..., Any]]) -> None:
    """Route calls of a function of this package to whatever `find` returns at that moment.

    Args:
        name: Name of the function, such as `"check_device_map"`.
        find: Returns the function to call; usually reads a name of the registering module.
    """
    _lookups[name] = find


def look_up(name: str, own: Function) -> Function:
    """The function to call under a name: a registered one, or else this package's own."""
    find = _lookups.get(name)
    return own if find is None else find()  # type: ignore[return-value]
