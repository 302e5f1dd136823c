"""With this folder on PYTHONPATH and IMITATED_PLATFORM set, a Linux process lacks what macOS or Windows lack.

Names that a module of Python does not have there are removed, calls that fail there fail, and `sys.platform` says so. The standard
library and torch are imported before: they have been told by their builds where they are.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import faulthandler
import fcntl
import io
import multiprocessing.connection  # noqa: F401 - Python's own modules ask for the system when they are imported
import os
import shutil
import signal
import socket  # noqa: F401
import subprocess  # noqa: F401
import sys
import tempfile  # noqa: F401
from collections.abc import Callable
from typing import Any

with contextlib.suppress(ImportError):
    import colorama.win32  # noqa: F401
if "RANK" in os.environ:  # the commands load no torch
    import torch.distributed.elastic.multiprocessing.errors
    import torch.utils.data  # noqa: F401

NOT_ON_MACOS = {
    os: "pidfd_open sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate fdatasync RWF_NOWAIT memfd_create",
    signal: "SIGRTMIN SIGRTMAX",
}
NOT_ON_WINDOWS = {
    os: "fork forkpty mkfifo pread preadv pwrite pwritev sysconf statvfs getuid geteuid getpgid killpg setsid register_at_fork "
    "getloadavg O_NONBLOCK sendfile " + NOT_ON_MACOS[os],
    signal: "SIGKILL SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGSTOP SIGCONT setitimer pthread_kill "
    + NOT_ON_MACOS[signal],
    faulthandler: "register unregister",
}
MODULES_OF_POSIX = ("fcntl", "termios", "resource", "pwd", "grp", "tty", "pty", "syslog")
OF_LINUX = ("prctl", "renameat2", "pidfd_open", "madvise")
kill, fsync, get_flags, library = os.kill, os.fsync, fcntl.fcntl, ctypes.CDLL


def remove(names: dict[Any, str]) -> None:
    for module, words in names.items():
        for name in words.split():
            vars(module).pop(name, None)


def without_proc(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of files for which there is no /proc."""

    def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith("/proc"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return function(path, *args, **kwargs)

    return call


class LibraryOfMacOS:
    """The C library, without what is Linux's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.library = library(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in OF_LINUX:
            raise AttributeError(name)
        return getattr(self.library, name)


def library_on_windows(name: str | None = None, *args: Any, **kwargs: Any) -> Any:
    if name is None:
        raise TypeError("argument 1 must be str, not None")
    return library(name, *args, **kwargs)


def kill_on_windows(process_id: int, number: int) -> None:
    assert number != 0, "a Ctrl-C for a group of processes"
    kill(process_id, number)


def fsync_on_windows(descriptor: int) -> None:
    if get_flags(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    fsync(descriptor)


class Kernel32:
    """What asks for a process there."""

    def __init__(self, name: str, **kwargs: Any) -> None:
        assert name == "kernel32"
        self.OpenProcess = self._open
        self.WaitForSingleObject = lambda handle, milliseconds: 0x102  # not ended
        self.CloseHandle = lambda handle: True

    @staticmethod
    def _open(rights: int, inherited: bool, process_id: int) -> int | None:
        try:
            kill(process_id, 0)
        except ProcessLookupError:
            return None
        return 44

    _open.restype = None  # type: ignore[attr-defined]


def symlink_on_windows(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.EPERM, "A required privilege is not held by the client")


platform = os.environ.get("IMITATED_PLATFORM")
if platform:
    for module, names in ((builtins, ["open"]), (io, ["open"]), (os, ["stat", "listdir", "scandir", "readlink"])):
        for name in names:
            setattr(module, name, without_proc(getattr(module, name)))
    os.lstat = without_proc(os.lstat)
if platform == "darwin":
    remove(NOT_ON_MACOS)
    ctypes.CDLL = LibraryOfMacOS  # type: ignore[assignment,misc]
if platform == "win32":
    remove(NOT_ON_WINDOWS)
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    sys.modules.update(dict.fromkeys(MODULES_OF_POSIX))  # type: ignore[arg-type]
    ctypes.CDLL = library_on_windows  # type: ignore[assignment,misc]
    ctypes.WinDLL, ctypes.get_last_error = Kernel32, lambda: 87  # type: ignore[attr-defined,misc,assignment]
    os.kill, os.fsync, os.symlink = kill_on_windows, fsync_on_windows, symlink_on_windows  # type: ignore[assignment]
if platform:
    sys.platform = platform
