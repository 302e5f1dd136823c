"""Names that a module of accelerate 1.15 had only because it used them, and that programs import from there all the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

# where they are; none of these asks back
HOMES = (
    "accelerate.utils", "accel_state", "accel_state.libraries", "accelerate.utils.constants", "accel_data",
    "accel_integrations", "accel_bigmodel", "accel_tracking", "accel_ops",
)  # fmt: skip


def found_among_neighbours(module: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of an old path: public names that it lacks are looked for where they have gone.

    Args:
        module: The old path, usually `__name__`. Its `logger` is the one of this name, for programs that filter it.

    Returns:
        The function; it raises AttributeError for names that are nowhere.
    """

    def find(name: str) -> Any:
        if name == "logger":
            return logging.getLogger(module)
        if not name.startswith("_"):
            for home in map(import_module, HOMES):
                try:
                    return getattr(home, name)
                except AttributeError:
                    continue
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find
