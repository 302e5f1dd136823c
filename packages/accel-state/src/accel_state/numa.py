"""NUMA affinity: binding a process to the CPU cores next to its GPU."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

from accel_state.environment import parse_flag_from_env
from accel_state.libraries import is_pynvml_available
from accel_state.nvidia import gpu_bus_ids, mig_parents

logger = logging.getLogger("accelerate.utils.environment")

SYSFS = Path("/sys")


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores of the NUMA node to which its NVIDIA GPU is attached.

    Where that cannot be done, nothing is bound: there is no such GPU, the machine does not report its node, as most virtual
    machines, or this process may use no core of the node. The process of local rank 0 then logs a warning with the reason.

    Args:
        local_process_index (`int`): Local rank, and index of the process's GPU.
        verbose (`bool`, *optional*): Log the cores and the reason on each rank; `ACCELERATE_DEBUG_MODE` when None.
    """
    if verbose is None:
        verbose = parse_flag_from_env("ACCELERATE_DEBUG_MODE")
    try:
        cores, reason = _cores_near_gpu(local_process_index)
        _bind(cores)
    except _NothingToBindError as error:
        level = logging.WARNING if local_process_index == 0 else logging.INFO if verbose else logging.DEBUG
        logger.log(level, "Local rank %d is not bound to CPU cores: %s", local_process_index, error)
        return
    if verbose:
        logger.info("Local rank %d is bound to CPU cores %s: %s", local_process_index, sorted(cores), reason)


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Like `override_numa_affinity`, but only once, so that later changes of the user are kept."""
    override_numa_affinity(local_process_index, verbose)


def _bind(cores: set[int]) -> None:
    """Bind this process to cores."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise _NothingToBindError(
            f"the system does not let this process choose cores {sorted(cores)} ({error.strerror})."
        ) from None


class _NothingToBindError(Exception):
    """Why a process is not bound to cores."""


def _cores_near_gpu(index: int) -> tuple[set[int], str]:
    """The cores to bind to, at least one, and the reason.

    Raises:
        _NothingToBindError: When the affinity is not to change.
    """
    from accel_state.hardware import is_cuda_available, is_rocm_available

    if not hasattr(os, "sched_setaffinity"):
        raise _NothingToBindError("this operating system does not bind processes to cores.")
    if not is_cuda_available() or is_rocm_available():
        raise _NothingToBindError("there is no NVIDIA GPU here.")
    bus_ids = _visible(gpu_bus_ids(is_pynvml_available()))
    if len(bus_ids) == 1:  # the launcher shows each process only its own
        index = 0
    if index >= len(bus_ids):
        visible = repr(os.environ["CUDA_VISIBLE_DEVICES"]) if "CUDA_VISIBLE_DEVICES" in os.environ else "not set"
        raise _NothingToBindError(
            f"the driver lists no GPU {index} for it: {len(bus_ids)} are visible (CUDA_VISIBLE_DEVICES is {visible})."
        )
    node = _node_of(bus_ids[index])
    cores = _cores_of(node, bus_ids[index])
    usable = os.sched_getaffinity(0)
    if not cores & usable:
        raise _NothingToBindError(
            f"its GPU {bus_ids[index]} belongs to memory node {node} with cores {sorted(cores)}, and this process may only "
            f"use cores {sorted(usable)}. Give the container or job cores of that node."
        )
    return cores & usable, f"its GPU {bus_ids[index]} belongs to memory node {node}"


def _node_of(bus_id: str) -> int:
    """The memory node of the GPU with this bus ID."""
    # "00000000:3B:00.0" is "0000:3b:00.0" in the file system
    domain, _, rest = bus_id.lower().partition(":")
    file = SYSFS / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node"
    node = _read(file, f"the memory node of its GPU {bus_id} is unknown").strip()
    if not node.isdecimal():  # -1, mostly
        raise _NothingToBindError(
            f"this machine reports no memory node for its GPU {bus_id} ({file} contains {node}), as most virtual machines. Where "
            "it has several, bind the processes by numactl."
        )
    return int(node)


def _cores_of(node: int, bus_id: str) -> set[int]:
    """The cores of the memory node to which the GPU with this bus ID belongs; at least one."""
    file = SYSFS / f"devices/system/node/node{node}/cpulist"
    listed = _read(file, f"the cores of memory node {node}, that of its GPU {bus_id}, are unknown")
    try:
        cores = parse_core_list(listed)
    except ValueError:
        raise _NothingToBindError(f"{file} contains {listed.strip()!r}, which is not a list of cores.") from None
    if not cores:  # memory alone, as that of GPUs which share it with the CPU
        raise _NothingToBindError(f"memory node {node}, that of its GPU {bus_id}, has no cores.")
    return cores


def _read(file: Path, otherwise: str) -> str:
    """The content of a file of the system."""
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "not text"
        raise _NothingToBindError(f"{otherwise}: {file} cannot be read ({cause}).") from None


def _visible(gpus: list[tuple[str, str]]) -> list[str]:
    """Bus ids in the order of `CUDA_VISIBLE_DEVICES`, which lists indices, (beginnings of) UUIDs, or MIG instances."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return [bus_id for bus_id, _ in gpus]
    nodes = []
    parents = mig_parents() if "MIG-" in wanted else {}
    for name in wanted.replace(" ", "").split(","):
        name = parents.get(name, name)
        matching = [
            bus_id
            for number, (bus_id, uuid) in enumerate(gpus)
            if name == str(number) or (name and uuid.startswith(name))
        ]
        if not matching:
            break  # CUDA too ignores everything from the first invalid name on
        nodes.append(matching[0])
    return nodes


def parse_core_list(text: str) -> set[int]:
    """The cores in a list such as `"0-3,8"`."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores.update(range(int(first), int(last or first) + 1))
    return cores
