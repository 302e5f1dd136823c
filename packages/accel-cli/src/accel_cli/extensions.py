"""Commands and options of other installed packages, declared as entry points.

`importlib.metadata` reads the metadata of every installed package, which takes longer than `--help`. This module reads
only the small files with the entry points.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache

COMMANDS_GROUP = "accelerate.commands"
"""Entry points that are modules with `add_arguments(parser)` and `run(args)`."""
OPTIONS_GROUP = "accelerate.options"
"""Entry points that are settings dataclasses, with fields made by `accel_state.settings.option.option`."""


def entry_points(group: str) -> dict[str, str]:
    """Find the entry points of a group.

    Args:
        group: `COMMANDS_GROUP`, `OPTIONS_GROUP`, or that of a `Kind` to whose choices other packages add.

    Returns:
        Name -> `"module"` or `"module:object"`. If two packages have a name, it is that of the first one on `sys.path`.
    """
    modules: dict[str, str] = {}
    for known, name, path in _all(tuple(sys.path)):
        if known == group:
            modules.setdefault(name, path)
    return modules


def brings(group: str, name: str) -> bool:
    """Whether an installed package has an entry point of that name, ignoring case."""
    return bool(group) and name.lower() in map(str.lower, entry_points(group))


@cache
def _all(folders: tuple[str, ...]) -> tuple[tuple[str, str, str], ...]:
    return tuple(row for folder in folders for text in _files(folder or os.curdir) for row in _read(text))


def _files(folder: str) -> Iterator[str]:
    """Yield the contents of files in one folder of `sys.path` that declare entry points for us."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info")))
    except OSError:  # no folder
        return
    for name in names:
        try:
            with open(os.path.join(folder, name, "entry_points.txt"), encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError):  # most packages have none
            continue
        if "[accelerate." in text:
            yield text


def _read(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (group, name, path) of each line."""
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            group = line.strip("[]").strip()
        elif "=" in line and not line.startswith(("#", ";")):
            name, path = (word.strip() for word in line.split("=", 1))
            yield group, name, path.partition("[")[0].strip()  # without extras
