"""Whether a process exists, on every system, and whether it is still the same one."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def exists(process_id: int) -> bool:
    """Whether a process of this machine has this id; True for one that this user may not ask about.

    Where Python's `os.kill(process_id, 0)` is a Ctrl-C (Windows), the system is asked for a handle.
    """
    if sys.platform == "win32":
        return _exists_on_windows(process_id)
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True


def start_of(process_id: int) -> int:
    """Start time of a process of this machine, in clock ticks; -1 once it has exited, 0 where the system does not tell."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text(errors="replace")
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()
    return -1 if fields[0] in "ZX" else int(fields[19])  # a zombie, or dead


def is_running(process_id: int, started: int = 0) -> bool:
    """Whether a process of this machine exists and has not exited.

    Args:
        process_id: Its id, which may have been reused since.
        started: Its `start_of`; 0 if that is not known.
    """
    now = start_of(process_id)
    return exists(process_id) and now >= 0 and started in (0, now)


def _exists_on_windows(process_id: int) -> bool:
    import ctypes

    synchronize, access_denied, still_runs = 0x00100000, 5, 0x102  # of OpenProcess, GetLastError, WaitForSingleObject
    kernel = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined, unused-ignore]
    kernel.OpenProcess.restype = ctypes.c_void_p
    handle = kernel.OpenProcess(synchronize, False, process_id)
    if not handle:
        return bool(ctypes.get_last_error() == access_denied)  # type: ignore[attr-defined, unused-ignore]
    try:
        return bool(kernel.WaitForSingleObject(ctypes.c_void_p(handle), 0) == still_runs)
    finally:
        kernel.CloseHandle(ctypes.c_void_p(handle))
