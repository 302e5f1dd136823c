"""Bringing an old config file up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accel_cli.configfile.migrate import migrate
from accel_cli.configfile.read import config_class, read_values
from accel_cli.configfile.write import write_config


def update(path: str) -> list[str]:
    """Rewrite a config file in today's words, with today's defaults for what it lacks.

    The file is replaced as a whole or not at all, and not touched when there is nothing to change. Comments are not
    kept.

    Args:
        path: The file.

    Returns:
        What was changed, one line for each.

    Raises:
        FileNotFoundError: When there is no such file.
        ValueError: When it cannot be read, or says something that is not allowed.
    """
    written, source = read_values(path)
    kind = config_class(written)
    kind.from_values(written, source)  # so that mistakes are named as the file has them
    values, done = migrate(written)
    config = kind.from_values(values, source)
    after = config.to_dict()
    lines = [str(item) for item in done] + list(_rest(values, after))
    if lines or not _is_of_its_kind(source.text, path):
        write_config(path, config)
    return lines


def _rest(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Say what is different without a row in the table: defaults that were added, emptiness that was left out."""
    added = [f"added {key}: {after[key]!r}" for key in after if key not in before]
    removed = [f"removed {key}: {before[key]!r}" for key in before if key not in after]
    changed = [
        f"changed {key}: {before[key]!r} is now {after[key]!r}"
        for key in after
        if key in before and before[key] != after[key]
    ]
    return added + removed + changed


def _is_of_its_kind(text: str, path: str) -> bool:
    """False for JSON in a file that its name calls YAML."""
    return Path(path).suffix == ".json" or not text.lstrip().startswith("{")
