"""Joining the processes for DeepSpeed: on which device, through which group, and without stale builds."""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accel_state import process_group
from accel_state.processes import kind_of
from accel_state.warning import warn_user

BUILDS_SHARED_MEMORY = "DS_BUILD_SHM_COMM"
"""0 spares CPUs the minute in which DeepSpeed compiles its exchange through shared memory, at the first start."""

COMPILED = frozenset({
    "async_io", "cpu_adagrad", "cpu_adam", "cpu_lion", "deepspeed_shm_comm", "fused_adam", "fused_lamb", "fused_lion",
})  # fmt: skip
"""What DeepSpeed compiles when it is first needed, by the names of the folders."""

_joined: weakref.ref[Any] | None = None  # the process group that DeepSpeed was told of


def load_library(device: torch.device) -> Any:
    """Import DeepSpeed for a device, which it settles when it is imported.

    Raises:
        ValueError: It was imported for another device already.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    found = get_accelerator().device_name()
    if found != device.type:
        raise ValueError(
            f"DeepSpeed computes on {found!r} in this process, but the Accelerator on {device.type!r}: set "
            f"DS_ACCELERATOR={device.type} before anything imports deepspeed, or make the Accelerator first."
        )
    if device.type == "cpu" and os.environ.get(BUILDS_SHARED_MEMORY) == "0":
        from deepspeed import ops

        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _warn_of_locks()
    return deepspeed


def _warn_of_locks() -> None:
    """Say why DeepSpeed may wait without a word: a build that was killed leaves its lock behind."""
    from torch.utils import cpp_extension

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    pattern = "*/lock" if "TORCH_EXTENSIONS_DIR" in os.environ else "*/*/lock"
    locks = [str(path) for path in Path(root).glob(pattern) if path.parent.name in COMPILED]
    if locks and os.environ.get("LOCAL_RANK", "0") == "0":
        warn_user(
            f"DeepSpeed will wait for the end of a build that another process has begun, as {', '.join(locks)} shows. If "
            "none is running, because it was killed, delete that file."
        )


def join_processes(device: torch.device, backend: str | None) -> None:
    """Have DeepSpeed use the process group there is; a process that stands alone gets a group of one.

    Args:
        device: Of this process.
        backend: The collective library of the run; None when there is no group.
    """
    global _joined
    from deepspeed import comm

    if not dist.is_initialized():
        process_group.start_alone(kind_of(device))
    if _joined is not None and _joined() is not dist.group.WORLD:  # of a run that has ended
        leave_processes()
    _joined = weakref.ref(dist.group.WORLD)
    os.environ.setdefault("LOCAL_RANK", "0")
    comm.init_distributed(dist_backend=backend or dist.get_backend(), auto_mpi_discovery=False, verbose=False)


def leave_processes() -> None:
    """Make DeepSpeed forget groups that are about to end, so that another run can begin in this process."""
    if "deepspeed" not in sys.modules:
        return
    import deepspeed.comm.comm as comm
    from deepspeed.utils import groups

    release = getattr(groups, "_release_process_group_references", None)
    if release is not None:  # since 0.19
        release(group=None)
    comm.cdb = None
