"""Whether a process exists, on every system."""

from __future__ import annotations

import os
import sys


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
