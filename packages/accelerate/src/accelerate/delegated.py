"""Attributes of the accelerator that live where they are used."""

from __future__ import annotations

from operator import attrgetter
from typing import Any


class Delegated:
    """An attribute that is one of a part of the object. Set at any time, it counts from then on.

    Args:
        path: Where it lives, seen from the object: "_preparer.rng_types".
        meaning: What `help(...)` shows.
    """

    def __init__(self, path: str, meaning: str) -> None:
        self.__doc__ = meaning
        self._get = attrgetter(path)
        part, _, self._name = path.rpartition(".")
        self._part = attrgetter(part)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self._get(instance)

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(self._part(instance), self._name, value)


def delegated(path: str, meaning: str) -> Any:
    """A `Delegated` that may stand where a value of any type is declared."""
    return Delegated(path, meaning)
