"""The file in which a run is recorded: one JSON object per line, only ever appended to.

A line is on disk a few milliseconds after it was queued: a background thread writes and syncs, several lines at once
when they come faster than the disk can write. So the training thread never waits for the disk. A killed process, or a
power cut, loses only what was logged in those milliseconds, and leaves at most one torn line, which readers skip.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

from accel_state.process_ids import start_of

FOLDER = "tracking"  # below the logging folder, one folder per run
FILE = "record.jsonl"
FORMAT = 1

encode = json.JSONEncoder(allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode
"""Encodes plain values as a line; raises ValueError or TypeError for what JSON cannot hold, NaN included."""

write = os.write
sync = getattr(os, "fdatasync", os.fsync)


class Record:
    """Appends lines to a file from a background thread.

    Args:
        path: The file; created if it does not exist.
        sync_seconds: Minimum time between two syncs; 0 syncs after each write.
    """

    def __init__(self, path: Path, sync_seconds: float = 0.0) -> None:
        self.path = path
        self._sync_seconds = sync_seconds
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._is_torn = not _ends_with_newline(self._descriptor)
        self._synced_at = -sync_seconds
        self._thread = threading.Thread(target=self._work, name="accel-tracking-record", daemon=True)
        self._thread.start()

    def append(self, line: str) -> None:
        """Queue a line, without its newline.

        Raises:
            OSError: When an earlier line could not be written, for instance because the disk is full. Each failure is
                raised once; later lines are written again.
        """
        self._lines.put(f"{line}\n".encode(errors="replace"))
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Write and sync all lines; a second call does nothing.

        Raises:
            OSError: When lines could not be written.
        """
        if self._descriptor < 0:
            return
        self._lines.put(None)
        self._thread.join()
        os.close(self._descriptor)
        self._descriptor = -1
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        is_open, is_dirty = True, False
        while is_open:
            lines, is_open = self._next_lines(self._sync_seconds if is_dirty else None)
            try:
                if lines:
                    is_dirty = True
                    self._write(lines)
                if is_dirty and (not is_open or time.monotonic() - self._synced_at >= self._sync_seconds):
                    sync(self._descriptor)
                    self._synced_at, is_dirty = time.monotonic(), False
            except OSError as error:
                self._error = error

    def _next_lines(self, timeout: float | None) -> tuple[bytes, bool]:
        """Wait for lines; returns all there are, and whether more may come."""
        lines = []
        try:
            line = self._lines.get(timeout=timeout)
            while line is not None:
                lines.append(line)
                line = self._lines.get_nowait()
        except queue.Empty:
            return b"".join(lines), True
        return b"".join(lines), False

    def _write(self, lines: bytes) -> None:
        data = memoryview(b"\n" + lines if self._is_torn else lines)
        while data:
            self._is_torn = True  # unless all of it is written
            data = data[write(self._descriptor, data) :]
        self._is_torn = False


def _ends_with_newline(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    if size == 0:
        return True
    os.lseek(descriptor, size - 1, os.SEEK_SET)  # what is written is appended wherever this is
    return os.read(descriptor, 1) == b"\n"


def process_identity() -> dict[str, Any]:
    """The facts by which other processes can tell later whether this process is still running."""
    import socket

    started = start_of(os.getpid())
    return {"host": socket.gethostname(), "pid": os.getpid(), "pid_started": str(started) if started else None}
