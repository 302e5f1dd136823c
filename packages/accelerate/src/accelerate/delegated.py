"""Attributes of the accelerator that are stored in one of its components."""

from __future__ import annotations

from operator import attrgetter
from typing import Any


class Delegated:
    """A descriptor for an attribute of a component, which can be set at any time.

    Args:
        path: Its path from the object: "_preparer.rng_types".
        meaning: The docstring that `help(...)` shows.
    """

    def __init__(self, path: str, meaning: str) -> None:
        self.__doc__ = meaning
        self._get = attrgetter(path)
        component, _, self._name = path.rpartition(".")
        self._component = attrgetter(component)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self._get(instance)

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(self._component(instance), self._name, value)


def delegated(path: str, meaning: str) -> Any:
    """A `Delegated`, typed so that it may be assigned to an attribute of any declared type."""
    return Delegated(path, meaning)
