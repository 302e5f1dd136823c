"""Initializing DeepSpeed on the run's device and process group, and warning about stale build locks."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_state import process_group
from accel_state.enums import DistributedType
from accel_state.environment import patch_environment
from accel_state.processes import kind_of
from accel_state.warning import warn_user

if TYPE_CHECKING:
    from accel_state.accelerator_state import AcceleratorState
    from accel_state.settings.deepspeed import DeepSpeedPlugin


def get_active_deepspeed_plugin(state: AcceleratorState) -> DeepSpeedPlugin:
    """The plugin in use.

    Args:
        state: The state of a run with DeepSpeed.

    Raises:
        ValueError: The run does not use DeepSpeed.
    """
    plugin: DeepSpeedPlugin | None = state.deepspeed_plugin
    if state.distributed_type != DistributedType.DEEPSPEED or plugin is None:
        raise ValueError(
            f"No DeepSpeed plugin is in use: the distributed_type of this run is {state.distributed_type.value!r}. "
            "Pass a DeepSpeedPlugin to Accelerator."
        )
    return plugin


BUILDS_SHARED_MEMORY = "DS_BUILD_SHM_COMM"
"""0 keeps DeepSpeed from compiling its shared-memory collectives for CPUs, which takes a minute at the first start."""

COMPILED = frozenset({
    "async_io", "cpu_adagrad", "cpu_adam", "cpu_lion", "deepspeed_shm_comm", "fused_adam", "fused_lamb", "fused_lion",
})  # fmt: skip
"""Folder names of the extensions that DeepSpeed compiles at first use."""

_joined: weakref.ref[Any] | None = None  # the process group that DeepSpeed uses


def load_library(device: torch.device) -> Any:
    """Import DeepSpeed for a device, which it chooses when it is imported.

    Raises:
        ValueError: It was imported for another device already.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    device_type = get_accelerator().device_name()
    if device_type != device.type:
        raise ValueError(
            f"DeepSpeed uses the device type {device_type!r} in this process, but the Accelerator uses {device.type!r}. Set "
            f"DS_ACCELERATOR={device.type} before anything imports deepspeed, or create the Accelerator first."
        )
    if device.type == "cpu" and os.environ.get(BUILDS_SHARED_MEMORY) == "0":
        from deepspeed import ops

        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _warn_of_locks()
    return deepspeed


def _warn_of_locks() -> None:
    """Warn that DeepSpeed may hang: a build that was killed leaves its lock file behind."""
    from torch.utils import cpp_extension

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    pattern = "*/lock" if "TORCH_EXTENSIONS_DIR" in os.environ else "*/*/lock"
    locks = [str(path) for path in Path(root).glob(pattern) if path.parent.name in COMPILED]
    if locks and os.environ.get("LOCAL_RANK", "0") == "0":
        warn_user(
            f"DeepSpeed will wait until another process has finished a build, because of the lock {', '.join(locks)}. "
            "If no build is running, for example because it was killed, delete that file."
        )


def join_processes(device: torch.device, backend: str | None) -> None:
    """Have DeepSpeed use the existing process group; a single process gets a group of one.

    Args:
        device: The device of this rank.
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


@contextmanager
def device_as_local_rank(device: torch.device) -> Iterator[None]:
    """A context in which DeepSpeed finds the device of this process, of which it takes the local rank to be the index.

    The two differ where the launcher shows each process its own device only.

    Args:
        device: The device of this rank; one without an index changes nothing.
    """
    names = [name for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK") if name in os.environ]
    with patch_environment(**({} if device.index is None else dict.fromkeys(names, device.index))):
        yield


def leave_processes() -> None:
    """Make DeepSpeed drop its process groups, so that another run can begin in this process."""
    if "deepspeed" not in sys.modules:
        return
    import deepspeed.comm.comm as comm
    from deepspeed.utils import groups

    release = getattr(groups, "_release_process_group_references", None)
    if release is not None:  # since 0.19
        release(group=None)
    comm.cdb = None
