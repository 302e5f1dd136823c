"""Hardware, files and ports of this machine, as far as a launch needs them."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from accel_cli.errors import MissingFileError, UsageError
from accel_state.clusters import DEFAULT_PORT

if TYPE_CHECKING:
    from accel_state.nvidia import MissingGpus


class Machine:
    """Queries about this machine. Tests replace it with a fake.

    Attributes:
        is_here: Whether answers were found by looking, so that notes may say so.
    """

    is_here = True

    def num_devices(self) -> int:
        """Count the accelerators of this machine; 0 without any. Imports torch."""
        from accel_state.devices import detect_device_kind

        kind = detect_device_kind()
        return 0 if kind.name == "cpu" else kind.device_count()

    def has_devices(self, gpu_ids: str = "") -> bool:
        """Whether processes of this machine see an accelerator. Imports torch.

        Args:
            gpu_ids: The GPUs that they are shown, as in `--gpu_ids`; empty for those that this process sees.
        """
        from accel_state.environment import patch_environment
        from accel_state.nvidia import VISIBLE

        with patch_environment(**{VISIBLE: gpu_ids} if gpu_ids else {}):
            return self.num_devices() > 0

    def fault_of_gpu_ids(self, gpu_ids: str) -> str:
        """Find a name in `--gpu_ids` that is not a GPU of this machine, or that of a GPU named before.

        Args:
            gpu_ids: Names of GPUs, separated by commas.

        Returns:
            What is wrong, as in `"names GPU '7', but this machine has only GPU 0"`; empty if all names are valid, or this
            machine has no NVIDIA GPU.
        """
        from accel_state.nvidia import describe_invalid, installed_gpus, invalid_gpu

        gpus = installed_gpus()
        return describe_invalid(gpu_ids, gpus) if gpus and invalid_gpu(gpu_ids, gpus) is not None else ""

    def missing_gpus(self, gpu_ids: str = "") -> MissingGpus | None:
        """Explain why processes see none of this machine's NVIDIA GPUs; None if it has none. Imports torch.

        Args:
            gpu_ids: The GPUs that they are shown, as in `--gpu_ids`; empty for those that this process sees.
        """
        from accel_state.nvidia import explain_missing_gpus

        return explain_missing_gpus(gpu_ids or None)

    def visible_devices_variable(self) -> str:
        """The environment variable that limits which accelerators a process sees. Imports torch."""
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

    def hosts(self, path: str) -> dict[str, int | None]:
        """Read which machines a hostfile lists, and how many processes each takes where it says so.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It cannot be read, or lists no machine.
        """
        try:
            with open(path, encoding="utf-8") as file:
                lines = [line.partition("#")[0].split() for line in file]
        except FileNotFoundError:
            raise MissingFileError(f"The hostfile {path!r} does not exist.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"The hostfile {path!r} cannot be read: {error}.") from None
        hosts = dict(_host(words) for words in lines if words)
        if not hosts:
            raise UsageError(f"The hostfile {path!r} lists no machine. Write one name per line.")
        return hosts

    def exists(self, path: str) -> bool:
        """Whether a file exists."""
        return os.path.exists(path)

    def is_root(self) -> bool:
        """Whether this user is root."""
        return hasattr(os, "geteuid") and os.geteuid() == 0

    def find_program(self, name: str) -> str | None:
        """Return the path of a program that can be run by its name; None when there is none."""
        import shutil

        return shutil.which(name)

    def mpi_version(self) -> str:
        """The output of `mpirun --version`; empty when there is no mpirun."""
        import subprocess

        if self.find_program("mpirun") is None:
            return ""
        done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
        return f"{done.stdout}\n{done.stderr}".strip()

    def port(self, wanted: int | None, default: int = DEFAULT_PORT) -> int:
        """Choose the port of the rendezvous.

        Args:
            wanted: The port that the user named; 0 for any free port, None if none was named.
            default: Used when the user named none and it is free.
        """
        if wanted:
            return wanted
        if wanted is None and is_free(default):
            return default
        return free_port()


def _host(words: list[str]) -> tuple[str, int | None]:
    """Read a line of a hostfile: `name`, `name:2` or `name slots=2`."""
    name, _, count = words[0].partition(":") if words[0].count(":") == 1 else (words[0], "", "")
    match = re.search(r"\bslots\s*=\s*(\d+)", " ".join(words[1:]))
    slots = match[1] if match else count
    return name, int(slots) if slots.isdigit() else None


def network_variables() -> dict[str, str]:
    """Return the NCCL variables for NVIDIA GPUs without peer-to-peer access. Asks the driver."""
    from accel_state.environment import check_cuda_p2p_ib_support

    if check_cuda_p2p_ib_support():
        return {}
    return {name: "1" for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") if name not in os.environ}


def is_free(port: int) -> bool:
    """True when no process listens on a port of this machine."""
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port for a process that will listen on it, so that no other program gets it meanwhile."""
    import socket

    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the one that will listen has it, too
        kept.bind(("", 0))
        yield int(kept.getsockname()[1])


def free_port() -> int:
    """Ask the system for a free port."""
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def holder_of(port: int) -> str:
    """Name the process that listens on a port of this machine: `"process 12 (python train.py)"`.

    It is `"another program"` for a process that this user may not inspect.
    """
    wanted = {f"socket:[{inode}]" for inode in _listening(port)}
    for path in glob.glob("/proc/[0-9]*/fd/*") if wanted else []:
        try:
            if os.readlink(path) not in wanted:
                continue
            process = path.split("/")[2]
            with open(f"/proc/{process}/cmdline", "rb") as file:
                words = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
        return f"process {process} ({words[:80]})"
    return "another program"


def _listening(port: int) -> list[str]:
    """Find the inode numbers of the sockets of this machine that listen on a port."""
    inodes = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        listens = "0A"
        inodes += [row[9] for row in rows if row[3] == listens and int(row[1].rpartition(":")[2], 16) == port]
    return inodes
