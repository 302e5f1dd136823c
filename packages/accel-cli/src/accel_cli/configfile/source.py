"""The text of a config file, and the lines of its keys."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

LARGEST_FILE_BYTES = 1_000_000
LONGEST_FOR_LIBYAML = 4_000  # characters; deep nesting in longer ones makes libyaml overflow the stack


@dataclass(frozen=True, slots=True)
class Source:
    """A config file that was read.

    Attributes:
        path: Its path, as given.
        text: Its content.
    """

    path: str
    text: str = ""

    def __str__(self) -> str:
        return f"Config file {self.path!r}"

    @property
    def is_json(self) -> bool:
        """True when the file must be JSON because of its name."""
        return self.path.endswith(".json")

    def at(self, *spellings: str) -> str:
        """Name the file and the line of a key.

        Args:
            *spellings: The names that the key may have in the file: `"num_machines"` or `"fsdp_config.version"`.
                Without a line if none of them is found.
        """
        for key in spellings:
            line = self.line_of(key)
            if line:
                return f"{self}, line {line}"
        return str(self)

    def line_of(self, key: str) -> int:
        """Return the number of the line with a key, from 1; 0 if there is none."""
        return _line_in_yaml(self.text, key.split(".")) or _line_by_search(self.text, key.rpartition(".")[2])


def read_source(path: str | os.PathLike[str]) -> Source:
    """Read the text of a config file.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not a text file, or much too large.
    """
    source = Source(os.fspath(path))
    if not os.path.exists(path):
        raise FileNotFoundError(f"{source} does not exist. Write one with `accelerate config`, or name another.")
    if os.path.isdir(path):
        raise ValueError(f"{source} cannot be read: it is a folder. Name a file in it.")
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror or error}.") from error
    if len(content) > LARGEST_FILE_BYTES:
        raise ValueError(
            f"{source} cannot be read: it has more than {LARGEST_FILE_BYTES} bytes, too many for a config file."
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source} cannot be read: it is not a text file (byte {error.start} is not UTF-8)."
        ) from None
    if "\0" in text:
        raise ValueError(f"{source} cannot be read: it is not a text file.")
    return Source(source.path, text)


def yaml_loader(text: str) -> Any:
    """Choose PyYAML's fast safe loader, or the slower one for long texts, where the fast one may crash."""
    import yaml

    return yaml.SafeLoader if len(text) > LONGEST_FOR_LIBYAML else getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _line_in_yaml(text: str, path: list[str]) -> int:
    """Find a key by the structure of the text; JSON is nearly always YAML, too."""
    import yaml

    try:
        node: Any = yaml.compose(text, yaml_loader(text))
    except (yaml.YAMLError, RecursionError):
        return 0
    line = 0
    for word in path:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        entries = [(key, value) for key, value in pairs if key.value == word]
        if not entries:
            return 0
        key, node = entries[-1]
        line = key.start_mark.line + 1
    return line


def _line_by_search(text: str, word: str) -> int:
    match = re.search(rf"(?m)^.*?[\"']?\b{re.escape(word)}\b[\"']?\s*:", text)
    return text[: match.start()].count("\n") + 1 if match else 0
