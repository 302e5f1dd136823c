"""Reading and writing the values of a config file, without checking them."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from accel_cli.configfile.location import default_config_path
from accel_cli.configfile.source import Source, read_source, yaml_loader


def parse(source: Source, format: str | None = None) -> dict[str, Any]:
    """Parse a config file without checking its values.

    If a key occurs twice, the last value is used, as in accelerate 1.15, with a warning if they differ.

    Args:
        source: The file.
        format: `"json"` or `"yaml"`; chosen by the ending of the name when None.

    Raises:
        ValueError: It is not JSON or YAML, or does not contain `key: value` pairs.
    """
    format = format or ("json" if source.is_json else "yaml")
    try:
        values = _parse(source, format)
    except RecursionError:
        raise ValueError(f"{source} is nested too deeply.") from None
    if not isinstance(values, dict):
        kind = "nothing" if values is None else f"a {type(values).__name__}"
        raise ValueError(f"{source} must contain `key: value` pairs, but contains {kind}.")
    return values


def _parse(source: Source, format: str) -> Any:
    text = source.text.lstrip()
    if text.startswith("{"):  # JSON is YAML, too, and PyYAML is slow to import
        try:
            return json.loads(text, object_pairs_hook=lambda pairs: _last_of_doubles(source, pairs))
        except json.JSONDecodeError as error:
            if format == "json":
                raise ValueError(f"{source} is not valid JSON: {error}.") from None
    elif format == "json":
        if not text:
            return None
        raise ValueError(f"{source} is not valid JSON: it must begin with a brace.")
    return _parse_yaml(source)


def _last_of_doubles(source: Source, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if values.get(key, value) != value:
            _warn(
                f"{source} has the key {key!r} twice, with different values. The last one, {value!r}, is used. Keep one of them."
            )
        values[key] = value
    return values


def _warn(text: str) -> None:
    import logging

    logging.getLogger("accelerate").warning(text)


def _parse_yaml(source: Source) -> Any:
    import yaml

    base: Any = yaml_loader(source.text)

    class SettingsLoader(base):
        """Loads plain values only, and warns if a key occurs twice with different values."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: dict[str, tuple[int, Any]] = {}
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                    continue
                line = key.start_mark.line + 1
                first, before = seen.get(key.value, (line, value))
                if before is not value and _content(before) != _content(value):
                    _warn(
                        f"{source}, line {line} has the key {key.value!r} again (first in line {first}), with another "
                        "value. The last one is used. Keep one of them."
                    )
                seen[key.value] = (line, value)
            return super().construct_mapping(node, deep)

        def reject_tag(self, node: Any) -> Any:
            raise ValueError(
                f"{source}, line {node.start_mark.line + 1}: the tag {_short(node.tag)!r} is not allowed. A config "
                "file contains plain values only."
            )

    SettingsLoader.add_constructor(None, SettingsLoader.reject_tag)
    try:
        return yaml.load(source.text, SettingsLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{source}{where}: not valid YAML, {error.problem or error.context}.") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{source} is not valid YAML: {' '.join(str(error).split())}.") from None


def _content(node: Any) -> Any:
    """The content of a YAML node, for comparing."""
    if not isinstance(node.value, list):
        return node.tag, node.value
    return [tuple(map(_content, item)) if isinstance(item, tuple) else _content(item) for item in node.value]


def _short(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")


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
