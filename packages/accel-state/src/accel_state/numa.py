"""Keeping a process on the CPU cores next to its GPU."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

from accel_state.environment import parse_flag_from_env
from accel_state.libraries import is_pynvml_available
from accel_state.nvidia import gpu_bus_ids

logger = logging.getLogger("accelerate.utils.environment")

SYSFS = Path("/sys")


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Keep this process on the cores of the memory node to which its NVIDIA GPU is attached.

    Does nothing where there is no such GPU, or where the machine does not say to which node it belongs.

    Args:
        local_process_index (`int`): Rank on this machine, and number of the process's GPU.
        verbose (`bool`, *optional*): Log what was decided; `ACCELERATE_DEBUG_MODE` decides when None.
    """
    if verbose is None:
        verbose = parse_flag_from_env("ACCELERATE_DEBUG_MODE")
    cores, reason = _cores_near_gpu(local_process_index)
    if cores:
        os.sched_setaffinity(0, cores)
    if verbose:
        logger.info("Process %d of this machine keeps to cores %s: %s", local_process_index, sorted(cores), reason)


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Like `override_numa_affinity`, but only once: what the user changes afterwards is left alone."""
    override_numa_affinity(local_process_index, verbose)


def _cores_near_gpu(index: int) -> tuple[set[int], str]:
    """The cores to keep to, none when there is nothing to choose; and why."""
    from accel_state.hardware import is_cuda_available, is_rocm_available

    if not hasattr(os, "sched_setaffinity") or not is_cuda_available() or is_rocm_available():
        return set(), "there is no NVIDIA GPU here, or the system cannot bind processes"
    bus_ids = _visible(gpu_bus_ids(is_pynvml_available()))
    if index >= len(bus_ids):
        return set(), f"{len(bus_ids)} GPUs can be seen"
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
    """Bus ids in the order of `CUDA_VISIBLE_DEVICES`, which names numbers or (beginnings of) UUIDs."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return [bus_id for bus_id, _ in gpus]
    found = []
    for name in wanted.replace(" ", "").split(","):
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
