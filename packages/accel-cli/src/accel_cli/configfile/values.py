"""Reading and writing the values of a config file, without checking them."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from accel_cli.configfile.location import default_config_path
from accel_cli.configfile.parse import parse
from accel_cli.configfile.source import Source, read_source


def read_values(
    config_file: str | os.PathLike[str] | None, format: str | None = None
) -> tuple[dict[str, Any], Source]:
    """Read the values of a config file without checking them.

    Args:
        config_file: A path; None means the default file.
        format: `"json"` or `"yaml"`; chosen by the ending of the name when None.

    Returns:
        The values, and the file, for messages.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not JSON or YAML, or does not contain `key: value` pairs.
    """
    path = os.path.expanduser(config_file) if config_file is not None else default_config_path(os.environ)
    source = read_source(path)
    return parse(source, format), source


def write_json(path: str | os.PathLike[str], values: dict[str, Any]) -> None:
    """Write sorted JSON."""
    _write_atomically(Path(path), json.dumps(values, indent=2, sort_keys=True) + "\n")


def write_yaml(path: str | os.PathLike[str], values: dict[str, Any]) -> None:
    """Write sorted YAML."""
    import yaml

    _write_atomically(Path(path), yaml.safe_dump(values, allow_unicode=True))


def _write_atomically(path: Path, text: str) -> None:
    """Write a temporary file and rename it, so that readers see the old or the new content."""
    path = Path(os.path.realpath(path))  # a symbolic link is kept
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(draft, mode)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
