"""The dictionary that all instances of a state share, and the attributes in it."""

from __future__ import annotations

import threading
from typing import Any

from accel_state.libraries import is_torch_xla_available
from accel_state.public_names import known_as


@known_as("accelerate.state.ThreadLocalSharedDict")
class ThreadLocalSharedDict(threading.local):
    """Class attribute with a dictionary for each thread: on TPUs one thread drives each core.

    Args:
        thread_local: Kept for callers that pass it; has no effect.
    """

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: dict[str, Any] = {}

    def __get__(self, instance: object, owner: type | None = None) -> dict[str, Any]:
        return self._storage

    def __set__(self, instance: object, value: dict[str, Any]) -> None:
        self._storage = value


SharedDict: type = ThreadLocalSharedDict if is_torch_xla_available() else dict


class Fact:
    """A documented attribute of a state; reading it before the state is initialized raises an error that says what to do.

    Args:
        meaning: The docstring of the attribute.

    Raises:
        AttributeError: When the attribute is read before the state is initialized.
    """

    def __init__(self, meaning: str) -> None:
        self.__doc__ = meaning

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:  # a value in the dictionary comes first
        if instance is None:
            return self
        own = type(instance).__name__
        raise AttributeError(
            f"`{own}` object has no attribute {self._name!r} now. This happens if `{own}._reset_state()` was called, or "
            f"nothing was initialized yet: create an `Accelerator()` or a `{own}()` first."
        )


def fact(meaning: str) -> Any:
    """A `Fact` that may stand where a value of any type is declared."""
    return Fact(meaning)
