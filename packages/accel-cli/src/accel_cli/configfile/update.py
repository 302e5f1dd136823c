"""Updating an old config file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accel_cli.configfile.migrate import migrate
from accel_cli.configfile.read import config_class, read_values
from accel_cli.configfile.write import write_config


def update(path: str) -> list[str]:
    """Rewrite a config file with today's keys and values, and defaults for missing keys.

    The file is replaced with an atomic rename, and not touched if there is nothing to change. Comments are not kept.

    Args:
        path: The file.

    Returns:
        The changes, one line for each.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It cannot be read, or a value in it is not valid.
    """
    written, source = read_values(path)
    kind = config_class(written)
    kind.from_values(written, source)  # so that errors name the keys of the file
    values, done = migrate(written)
    config = kind.from_values(values, source)
    after = config.to_dict()
    lines = [str(item) for item in done] + list(_rest(values, after))
    if lines or not _is_of_its_kind(source.text, path):
        write_config(path, config)
    return lines


def _rest(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Describe the other differences: defaults that were added, empty values that were removed."""
    added = [f"added {key}: {after[key]!r}" for key in after if key not in before]
    removed = [f"removed {key}: {before[key]!r}" for key in before if key not in after]
    changed = [
        f"changed {key}: {before[key]!r} is now {after[key]!r}"
        for key in after
        if key in before and before[key] != after[key]
    ]
    return added + removed + changed


def _is_of_its_kind(text: str, path: str) -> bool:
    """False for JSON in a file with the name of a YAML file."""
    return Path(path).suffix == ".json" or not text.lstrip().startswith("{")
