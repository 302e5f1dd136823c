"""Names that a module of accelerate 1.15 had only because it used them, and that programs import from there all the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from accelerate.compat.legacy_names import LEGACY_NAMES


def legacy_getattr(module: str) -> Callable[[str], Any]:
    """Make the `__getattr__` (PEP 562) of an old path, for the names that `LEGACY_NAMES` lists and no others.

    Nothing is stored in the module, so that a name set there by another library is found in its `vars`.

    Args:
        module: The old path, usually `__name__`. `logger` is the logger of this name, for programs that filter it.

    Returns:
        The function; it raises AttributeError for names that are not in the table.
    """

    def find(name: str) -> Any:
        if name == "logger":
            return logging.getLogger(module)
        where, _, source = _homes(module).get(name, "").partition(":")
        if not where:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(where), source)

    return find


@cache
def _homes(module: str) -> dict[str, str]:
    """`"module:name"` where a legacy name of an old path is defined, by that name."""
    homes = {}
    for where, names in LEGACY_NAMES.get(module, {}).items():
        for entry in names.split():
            name, _, source = entry.partition("=")
            homes[name] = f"{where}:{source or name}"
    return homes
