"""Weak references that can be pickled: for objects that refer to what owns them.

A cycle of references keeps models, optimizer states and worker processes alive until the garbage collector runs, which may be
long after a program has let go of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

T = TypeVar("T")


@final
class Weak(Generic[T]):
    """Refers to an object without keeping it alive. A pickled or deep copy refers to the copy.

    Args:
        target: The object, of a class that allows weak references.
    """

    __slots__ = ("_kind", "_ref")

    def __init__(self, target: T) -> None:
        self._ref: Callable[[], T | None] = weakref.ref(target)
        self._kind = type(target).__name__

    def find(self) -> T | None:
        """The object; None once it is gone."""
        return self._ref()

    def get(self) -> T:
        """The object.

        Raises:
            ReferenceError: It is gone.
        """
        target = self._ref()
        if target is None:
            raise ReferenceError(
                f"The {self._kind} that this object belongs to was deleted. Keep a reference to it (of what prepare() made, to "
                "the accelerator) as long as the object is in use."
            )
        return target

    def __reduce__(self) -> Any:
        return _weak, (self._ref(), self._kind)


def _weak(target: T | None, kind: str) -> Weak[T]:
    """A copy, also of a reference to an object that is gone."""
    made: Weak[T] = Weak.__new__(Weak)
    made._ref, made._kind = _gone if target is None else weakref.ref(target), kind
    return made


def _gone() -> None:
    """Stands for a weak reference to an object that is gone."""
