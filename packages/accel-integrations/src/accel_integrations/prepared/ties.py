"""What an engine keeps about the objects of its process."""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakKeyDictionary

K = TypeVar("K")
V = TypeVar("V")


class Ties(WeakKeyDictionary[K, V]):
    """Notes on objects of this process, which it does not keep alive. A pickled copy has none: it has other objects."""

    def __reduce__(self) -> Any:
        return type(self), ()
