"""Writing files that a launched command reads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from accel_cli.errors import UsageError


def write_private(path: str, text: str) -> None:
    """Write a file that only this user can read, with an atomic rename.

    A symbolic link of this name is replaced, not followed.

    Raises:
        ValueError: The file cannot be written.
    """
    folder = os.path.dirname(path) or "."
    try:
        handle, draft = tempfile.mkstemp(prefix=f"{os.path.basename(path)}.", dir=folder)  # readable by the owner only
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError as error:
        raise UsageError(f"{path!r} cannot be written: {error.strerror or error}.") from error


@contextmanager
def present(files: Iterable[tuple[str, str]]) -> Iterator[None]:
    """Create files for the time that a block runs.

    Args:
        files: Path and text of each.
    """
    written = []
    try:
        for path, text in files:
            write_private(path, text)
            written.append(path)
        yield
    finally:
        for path in written:
            with suppress(FileNotFoundError):
                os.unlink(path)
