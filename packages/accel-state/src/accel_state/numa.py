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

    Does nothing where there is no such GPU, or where the machine does not report its node.

    Args:
        local_process_index (`int`): Local rank, and index of the process's GPU.
        verbose (`bool`, *optional*): Log the cores and the reason; `ACCELERATE_DEBUG_MODE` when None.
    """
    if verbose is None:
        verbose = parse_flag_from_env("ACCELERATE_DEBUG_MODE")
    cores, reason = _cores_near_gpu(local_process_index)
    if cores:
        os.sched_setaffinity(0, cores)
    if verbose:
        logger.info("Local rank %d is bound to CPU cores %s: %s", local_process_index, sorted(cores), reason)


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Like `override_numa_affinity`, but only once, so that later changes of the user are kept."""
    override_numa_affinity(local_process_index, verbose)


def _cores_near_gpu(index: int) -> tuple[set[int], str]:
    """The cores to bind to, empty when the affinity is not to change; and the reason."""
    from accel_state.hardware import is_cuda_available, is_rocm_available

    if not hasattr(os, "sched_setaffinity") or not is_cuda_available() or is_rocm_available():
        return set(), "there is no NVIDIA GPU here, or the system cannot bind processes"
    bus_ids = _visible(gpu_bus_ids(is_pynvml_available()))
    if len(bus_ids) == 1:  # the launcher shows each process only its own
        index = 0
    if index >= len(bus_ids):
        return set(), f"{len(bus_ids)} GPUs are visible"
    # "00000000:3B:00.0" is "0000:3b:00.0" in the file system
    domain, _, rest = bus_ids[index].lower().partition(":")
    node_file = SYSFS / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node"
    try:
        node = int(node_file.read_text())
        listed = (SYSFS / f"devices/system/node/node{node}/cpulist").read_text() if node >= 0 else ""
    except (OSError, ValueError):
        node, listed = -1, ""
    cores = parse_core_list(listed) & os.sched_getaffinity(0)
    return cores, f"its GPU {bus_ids[index]} belongs to memory node {node}"


def _visible(gpus: list[tuple[str, str]]) -> list[str]:
    """Bus ids in the order of `CUDA_VISIBLE_DEVICES`, which lists indices, (beginnings of) UUIDs, or MIG instances."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return [bus_id for bus_id, _ in gpus]
    found = []
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
        found.append(matching[0])
    return found


def parse_core_list(text: str) -> set[int]:
    """The cores in a list such as `"0-3,8"`."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores.update(range(int(first), int(last or first) + 1))
    return cores
