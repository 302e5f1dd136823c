"""Main memory that an accelerator may read by itself."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from accel_state.warning import warn_user


def pinned(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Page-locked memory of exactly this size (uint8, one dimension).

    CUDA memory is registered by hand, because PyTorch's allocator rounds up to a power of two, which for a model in
    main memory may be half of it again.

    Args:
        num_bytes: Its size.
        device: The accelerator that reads it.

    Returns:
        The memory; if the system refuses to lock that much, ordinary memory, with a warning.
    """
    if device.type != "cuda" or torch.version.hip is not None or num_bytes == 0:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    runtime: Any = torch.cuda.cudart()
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    address = memory.data_ptr()
    with torch.cuda.device(device):
        error = int(runtime.cudaHostRegister(address, num_bytes, 0))
    if error == 0:
        weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, address)
    else:
        warn_user(
            f"CUDA could not lock {num_bytes:,} bytes of main memory (error {error}), so weights travel more slowly: raise "
            "the limit of locked memory (ulimit -l), or leave more memory free."
        )
    return memory
