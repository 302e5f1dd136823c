"""What this machine has, as far as a launch must know."""

from __future__ import annotations

import glob
import os


class Machine:
    """Answers about this machine. Tests put another one in its place."""

    def num_devices(self) -> int:
        """Count the accelerators that processes can be put on; 0 without any. Imports torch."""
        from accel_state.devices import detect_device_kind

        kind = detect_device_kind()
        return 0 if kind.name == "cpu" else kind.device_count()

    def visible_devices_variable(self) -> str:
        """Name the variable that limits which accelerators a process sees. Imports torch."""
        from accel_state.devices import detect_device_kind

        return detect_device_kind().visible_devices_variable or "CUDA_VISIBLE_DEVICES"

    def num_cores(self) -> int:
        """Count the physical CPU cores that this process may use; at least 1."""
        if hasattr(os, "sched_getaffinity"):
            usable = len(os.sched_getaffinity(0))
        else:
            usable = os.cpu_count() or 1
        siblings = set()
        for path in glob.glob("/sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list"):
            with open(path, encoding="ascii") as file:
                siblings.add(file.read())
        return max(1, min(usable, len(siblings) or usable))

    def port(self, wanted: int | None, usual: int = 29500) -> int:
        """Choose the port at which the processes meet.

        Args:
            wanted: What the user named; 0 for any free port, None for no opinion.
            usual: Taken when the user has no opinion and it is free.
        """
        if wanted:
            return wanted
        if wanted is None and is_free(usual):
            return usual
        return free_port()


def network_variables() -> dict[str, str]:
    """Return what NVIDIA cards need that cannot send to one another directly. Asks the driver."""
    from accel_state.environment import check_cuda_p2p_ib_support

    if check_cuda_p2p_ib_support():
        return {}
    return {name: "1" for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") if name not in os.environ}


def is_free(port: int) -> bool:
    """True when nobody listens on a port of this machine."""
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """Ask the system for a port that nobody uses now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
