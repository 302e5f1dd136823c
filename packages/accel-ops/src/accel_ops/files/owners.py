"""The owner of unfinished files: a process that still writes them, or one that is dead.

The name of what is being written says which process does it, so that it is known from the very moment it exists. A process
of this machine is looked up; one of another machine, which shares the file system, is known only by its heartbeat: it
touches its folder every few seconds.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

from accel_state.process_ids import is_running, start_of

PATTERN = r"(?P<host>[\w-]*)-(?P<machine>[0-9a-f]{8})-(?P<process>\d+)-(?P<started>\d+)-(?P<since>\d+)"
MAX_HOST_LETTERS = 24
BEAT_SECONDS = 10.0
OLD_SECONDS = 3600.0
"""After so long without a heartbeat, unfinished files of a process on another machine are removed."""


@dataclass(frozen=True)
class Owner:
    """A process on any of the machines that share a file system.

    Attributes:
        host: Host name of its machine, for messages.
        machine: An id of the machine, its boot, and the container's process namespace.
        process: Its process id there.
        started: When it started, in clock ticks since the machine did; 0 where that is unknown.
        since: When it began to write, in seconds since 1970.
    """

    host: str
    machine: str
    process: int
    started: int
    since: int

    @classmethod
    def this_process(cls) -> Owner:
        """This process, writing from now on."""
        host = re.sub(r"[^\w-]|_", "-", socket.gethostname(), flags=re.ASCII)[:MAX_HOST_LETTERS]
        return cls(host, machine_id(), os.getpid(), start_of(os.getpid()), int(time.time()))

    @classmethod
    def from_name(cls, text: str) -> Owner | None:
        """Parse the owner from a file name; None if it has none."""
        match = re.fullmatch(PATTERN, text, flags=re.ASCII)
        if match is None:
            return None
        numbers = (int(match[key]) for key in ("process", "started", "since"))
        return cls(match["host"], match["machine"], *numbers)

    @property
    def name(self) -> str:
        """The owner as it is written in file names."""
        return f"{self.host}-{self.machine}-{self.process}-{self.started}-{self.since}"

    @property
    def is_here(self) -> bool:
        """Whether it runs, or ran, on this machine, where its process id can be looked up."""
        return self.machine == machine_id()

    @property
    def is_this_process(self) -> bool:
        """Whether it is this process."""
        return self.is_here and self.process == os.getpid() and self.started == start_of(os.getpid())

    def may_be_alive(self, path: Path) -> bool:
        """Whether it may still be writing.

        Args:
            path: The folder that its heartbeat touches.
        """
        if self.is_here:
            return is_running(self.process, self.started)
        try:
            return time.time() - path.stat().st_mtime < OLD_SECONDS
        except OSError:
            return False

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since).strftime("%Y-%m-%d %H:%M:%S")
        return f"process {self.process} on {self.host or 'another machine'}, since {since}"


class Heartbeat:
    """Touches a folder every few seconds, until stopped.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(self._path)

    def stop(self) -> None:
        """Stop it; a second call does nothing."""
        self._stopped.set()
        self._thread.join()


@cache
def machine_id() -> str:
    """An id that only processes share which see each other's process ids: containers may have one host name."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join([sys.platform, *parts]).encode()).hexdigest()[:8]
