"""What other packages do when the default process group begins: `accel_ops` watches its ranks."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol, cast

_modules: list[str] = []


class GroupObserver(Protocol):
    """A module that `on_group_started` registers."""

    def prepare(self) -> None:
        """Called before `PartialState` makes a group."""

    def begin(self, since_nanoseconds: int | None) -> None:
        """Called when a group exists; again for each `PartialState` that is created with it.

        Args:
            since_nanoseconds: When it began to be made, as in `time.time_ns`; None where the program made it.
        """


def on_group_started(module: str) -> None:
    """Register a module, which is imported once there is a group.

    Args:
        module: Its dotted name; it defines the functions of `GroupObserver`.
    """
    if module not in _modules:
        _modules.append(module)


def observers() -> list[GroupObserver]:
    """The registered modules."""
    modules: list[Any] = [import_module(module) for module in _modules]
    return cast(list[GroupObserver], modules)
