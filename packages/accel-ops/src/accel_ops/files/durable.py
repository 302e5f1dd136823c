"""Durable files and folders: written, checksummed and synced to the disk (fsync) when a call returns."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accel_ops.files.checksum import extend_checksum, format_checksum
from accel_ops.files.owners import Owner
from accel_state.supervision import report_progress

StrPath = str | os.PathLike[str]

PIECE_BYTES = 1 << 20  # smaller writes are gathered, larger ones are written and summed in pieces
AT_FDCWD = -100
RENAME_EXCHANGE = 2


def fsync_file(path: StrPath) -> None:
    """Sync a file's content to the disk (fsync)."""
    writable = sys.platform == "win32"  # which syncs no descriptor that was opened for reading
    descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(path: StrPath) -> None:
    """Sync a folder's directory entries to the disk (fsync). Does nothing where folders cannot be opened (Windows)."""
    if sys.platform == "win32":
        return
    fsync_file(path)


def make_folder(path: StrPath) -> Path:
    """Create a folder and its missing parents and sync them; does nothing if it exists."""
    folder = Path(path)
    missing = [ancestor for ancestor in (folder, *folder.parents) if not ancestor.exists()]
    for ancestor in reversed(missing):
        ancestor.mkdir(exist_ok=True)
        fsync_folder(ancestor.parent)
    return folder


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Add the path to errors of file descriptors, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or path
        raise


class DurableFile:
    """A new binary file that is synced to the disk when closed, and whose size and checksum are then known.

    An error while writing is kept and raised by `close`, and what is written after it is dropped: serializers that call
    back from C++ turn an exception into one that no longer says that the disk was full.

    Args:
        path: Must not exist.
        sync: Called with the open descriptor instead of `os.fsync`, and takes over closing it. Lets a caller wait for
            several files at once.
        shown: The path that errors name; `path` unless given.
    """

    def __init__(self, path: StrPath, sync: Callable[[int], None] | None = None, shown: StrPath | None = None) -> None:
        self.path = Path(path)
        self._shown = os.fspath(path if shown is None else shown)
        self.num_bytes = 0
        self.error: OSError | None = None
        self._checksum = 0
        self._small = bytearray()
        self._sync = sync
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)

    @property
    def checksum(self) -> str:
        """Checksum of the content, once closed."""
        return format_checksum(self._checksum)

    def write(self, data: Any) -> int:
        """Append a contiguous buffer of any item type; returns its length in bytes."""
        view = memoryview(data).cast("B")
        if self.error is None:
            try:
                if len(view) < PIECE_BYTES:
                    self._small += view
                if len(view) >= PIECE_BYTES or len(self._small) >= PIECE_BYTES:
                    self._write_small()
                if len(view) >= PIECE_BYTES:
                    self._append(view)
            except OSError as error:
                self.error = error
        return len(view)

    def _write_small(self) -> None:
        """Write the buffer of small writes."""
        if self._small:
            self._append(memoryview(self._small))
        self._small = bytearray()

    def _append(self, view: memoryview) -> None:
        """Write a buffer and sum it, piece by piece: each is in the processor's cache when it is needed again."""
        report_progress()
        with _naming(self._shown):
            for begin in range(0, len(view), PIECE_BYTES):
                piece = view[begin : begin + PIECE_BYTES]
                self._checksum = extend_checksum(self._checksum, piece)
                self.num_bytes += len(piece)
                while piece:
                    piece = piece[os.write(self._descriptor, piece) :]

    def flush(self) -> None:
        """Do nothing before `close`; serializers call it."""

    def close(self) -> None:
        """Write and sync the content.

        Raises:
            OSError: The file could not be written.
        """
        if self.error is None:
            try:
                self._write_small()
            except OSError as error:
                self.error = error
        if self.error is not None:
            self.discard()
            raise self.error
        if (descriptor := self._release()) < 0:
            return
        if self._sync is not None:
            self._sync(descriptor)
            return
        try:
            with _naming(self._shown):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def discard(self) -> None:
        """Close without syncing; the caller removes the file."""
        if (descriptor := self._release()) >= 0:
            os.close(descriptor)

    def _release(self) -> int:
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or self.error is not None:
            self.close()  # raises the kept OSError, which says more than the serializer's error
        else:
            self.discard()


_WRITING: set[Path] = set()  # temporary files of this process, so that leftovers with its number can be told apart


@contextlib.contextmanager
def write_atomically(path: StrPath, *, durable: bool = True) -> Iterator[DurableFile]:
    """Write a file atomically: it appears under its name, or replaces the old file, only when it is complete.

    A link is followed, so what it points to is replaced. A pipe or device is written to directly.

    Args:
        path: The file.
        durable: Whether it is synced to the disk (fsync) before it gets its name. A cache, which can be written again,
            needs no sync: it survives the end of the process, but not that of the machine.

    Yields:
        The file to write to.

    Raises:
        OSError: It could not be written; the old file is unchanged.

    Example:
        ```python
        with write_atomically("notes.txt") as file:
            file.write(b"all or nothing")
        ```
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not stat.S_ISREG(target.stat().st_mode):
        if target.is_dir():
            raise IsADirectoryError(
                errno.EISDIR, "Cannot write a file: this is a folder. Name a file in it", str(path)
            )
        with open(target, "wb") as device:
            yield device  # type: ignore[misc]  # has all that a serializer needs
        return
    _remove_leftovers(target)
    temporary = target.with_name(f".{target.name}.{Owner.this_process().name}.{secrets.token_hex(4)}.writing")
    _WRITING.add(temporary)
    try:
        with DurableFile(temporary, shown=path) if durable else _plain_file(temporary, path) as file:
            yield file
        if target.exists():
            os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        _WRITING.discard(temporary)
    if durable:
        fsync_folder(target.parent)


@contextlib.contextmanager
def _plain_file(path: Path, shown: StrPath) -> Iterator[Any]:
    """A new binary file that is neither synced nor summed, and whose errors name the path `shown`."""
    with _naming(os.fspath(shown)), open(path, "xb") as file:
        yield file


def _remove_leftovers(target: Path) -> None:
    """Remove temporary files of processes that were killed in `write_atomically(target)`."""
    name = re.compile(rf"\.{re.escape(target.name)}\.([\w-]+)\.[0-9a-f]{{8}}\.writing")
    for entry in os.listdir(target.parent):
        if match := name.fullmatch(entry):
            path, owner = target.with_name(entry), Owner.from_name(match[1])
            if owner is None or (path not in _WRITING if owner.is_this_process else not owner.may_be_alive(path)):
                path.unlink(missing_ok=True)


def exchange_folders(first: StrPath, second: StrPath) -> None:
    """Swap the names of two existing folders of one file system atomically.

    Raises:
        OSError: The system or file system cannot do this (`ENOSYS`, `EINVAL`, `EBUSY`, `EXDEV`); nothing has changed.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        raise OSError(errno.ENOSYS, "this system cannot exchange folders")
    if rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(first), None, str(second))
