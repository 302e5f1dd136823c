"""Pinned CPU memory, from which accelerators copy asynchronously, and how much of it weights may take."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import torch

from accel_state.warning import warn_user

_lock = threading.RLock()  # a finalizer may run while its own thread counts
_held_bytes = 0  # of this process


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_lock)  # the thread that held it is not there


def may_pin(num_bytes: int) -> bool:
    """Whether weights may take so much more pinned memory: at most half of what would be available without any.

    The system can neither swap nor drop pinned memory. A machine that has too little of the other kind kills processes
    instead of becoming slow.
    """
    import psutil

    return 2 * (_held_bytes + num_bytes) <= psutil.virtual_memory().available + _held_bytes


def pinned(num_bytes: int, device: torch.device, stream: Any) -> torch.Tensor:
    """Pinned memory of exactly this size (uint8, one dimension).

    CUDA memory is registered by hand, because PyTorch's allocator rounds up to a power of two, which for a large
    model may be half of it again.

    Args:
        num_bytes: Its size in bytes.
        device: The accelerator that reads it.
        stream: The stream of the device on which it is read. The memory is not freed before copies on it have ended.

    Returns:
        The memory; pageable memory, with a warning, if the system cannot pin that much.
    """
    if device.type != "cuda" or torch.version.hip is not None or num_bytes == 0:
        memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)  # torch waits for copies from it
        _count(num_bytes)
        weakref.finalize(memory.untyped_storage(), _count, -num_bytes)
        return memory
    runtime: Any = torch.cuda.cudart()
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    address = memory.data_ptr()
    with torch.cuda.device(device):
        error = int(runtime.cudaHostRegister(address, num_bytes, 0))
    if error == 0:
        _count(num_bytes)
        weakref.finalize(memory.untyped_storage(), _unregister, runtime, address, num_bytes, stream)
    else:
        warn_user(
            f"CUDA could not pin {num_bytes:,} bytes of CPU memory (error {error}), so weights are copied more slowly: raise "
            "the limit of locked memory (ulimit -l), or leave more memory free."
        )
    return memory


def _unregister(runtime: Any, address: int, num_bytes: int, stream: Any) -> None:
    """Unpin memory that is about to be freed; torch does not know which copies still read it."""
    _count(-num_bytes)
    try:
        stream.synchronize()
    finally:
        runtime.cudaHostUnregister(address)


def _count(num_bytes: int) -> None:
    global _held_bytes
    with _lock:
        _held_bytes += num_bytes
