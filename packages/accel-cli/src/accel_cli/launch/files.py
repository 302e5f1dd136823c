"""Writing what a command will read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from accel_cli.errors import UsageError


def write_private(path: str, text: str) -> None:
    """Write a file that only this user can read, whole or not at all.

    A link in its place is replaced, not followed.

    Raises:
        ValueError: When the file cannot be written.
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
    """Have files while a block runs.

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
