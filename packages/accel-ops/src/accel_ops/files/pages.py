"""Advice to the operating system about memory-mapped files: which pages to read ahead, and which to drop."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

PROBES = 4


def read_ahead(address: int, num_bytes: int) -> None:
    """Have the system read a range of a mapped file from the disk; returns once the reads are started."""
    _advise(address, num_bytes, "MADV_WILLNEED")


def forget(address: int, num_bytes: int) -> None:
    """Release the memory of a range that is not used now; what was written to it is lost."""
    _advise(address, num_bytes, "MADV_DONTNEED")


def is_in_memory(address: int, num_bytes: int) -> bool:
    """Whether a range of a mapped file is in memory, judged by a few pages; True where the system cannot tell."""
    function = _function("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    if function is None or not num_bytes:
        return True
    page = ctypes.c_ubyte()
    for probe in range(PROBES):
        place = (address + (num_bytes - 1) * probe // (PROBES - 1)) // mmap.PAGESIZE * mmap.PAGESIZE
        if function(place, 1, ctypes.byref(page)) == 0 and not page.value & 1:
            return False
    return True


def _advise(address: int, num_bytes: int, advice: str) -> None:
    """Give advice on the pages that lie within a range completely, so that nothing beside it is affected."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    function = _function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if length > 0 and hasattr(mmap, advice) and function is not None:
        function(begin, length, getattr(mmap, advice))


@cache
def _function(name: str, *argument_types: Any) -> Any:
    """A function of the C library, if it has one of this name."""
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform != "win32" else None
    if function is not None:
        function.argtypes = argument_types
    return function
