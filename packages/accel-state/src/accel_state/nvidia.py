"""Information about NVIDIA GPUs, found out without initializing CUDA."""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from accel_state.warning import warn_user

# Consumer cards of this series have no peer-to-peer transfers; from this driver on NCCL detects that itself.
SERIES_WITHOUT_P2P = "RTX 40"
DRIVER_THAT_KNOWS = "550.40.07"

DEVICE_FILES = Path("/dev")
DRIVER_FILES = Path("/proc/driver/nvidia")
VISIBLE = "CUDA_VISIBLE_DEVICES"
HIDING = frozenset({"", "-1", "none", "void", "nodevfiles"})
"""Beginnings of `CUDA_VISIBLE_DEVICES` by which users, and SLURM, hide all GPUs on purpose; in lower case."""


class MissingGpus(NamedTuple):
    """Why torch sees no GPU on a machine that has some."""

    gpus: str
    """The GPUs of the machine: `"GPU 0"` or `"GPUs 0 to 7"`."""
    reason: str
    """What happened, with the value seen; the part of a sentence."""
    advice: str
    """What to do; a sentence without its period."""
    on_purpose: bool = False
    """Whether the user has hidden them."""


def _query(field: str) -> list[str]:
    """One line per GPU from `nvidia-smi`.

    Raises:
        FileNotFoundError: Where there is no `nvidia-smi`.
        subprocess.CalledProcessError: Where it finds no driver.
    """
    import subprocess  # takes longer than all of this module, and few programs ask

    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    lines = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).splitlines()
    return [line.strip() for line in lines if line.strip()]


def get_gpu_info() -> tuple[list[str], int]:
    """The names of this machine's NVIDIA GPUs and their number, as `nvidia-smi` reports them."""
    names = _query("name")
    return names, len(names)


def get_driver_version() -> str:
    """The version of the NVIDIA driver, such as `"550.54.15"`."""
    return _query("driver_version")[0]


def installed_gpus() -> list[str]:
    """The UUIDs of the NVIDIA GPUs that this machine, or this container, has; `""` for those that cannot be found out.

    They are read from files, in a fraction of a millisecond, and nothing is initialized. Where the device files and those of
    the driver do not agree, as on WSL and in containers with some of the GPUs, `nvidia-smi` is asked. A job may be
    allowed to use fewer.
    """
    # Containers without a GPU see the driver's files, and device files may be made only when the first program needs them.
    count = len(_device_files())
    uuids = [_uuid_in(file) for file in sorted(DRIVER_FILES.glob("gpus/*/information"))]
    if count != len(uuids) or not count:
        listed = gpu_bus_ids(through_library=False) if shutil.which("nvidia-smi") else []
        return [uuid for _, uuid in listed] or [""] * count
    return uuids


def _device_files() -> list[Path]:
    """The device file of each GPU."""
    files = DEVICE_FILES.glob("nvidia[0-9]*")
    return sorted(file for file in files if file.name.removeprefix("nvidia").isdigit())


def _uuid_in(file: Path) -> str:
    """The UUID in the driver's description of a GPU."""
    try:
        listed = re.search(r"GPU UUID:\s*(GPU-[0-9a-fA-F-]+)", file.read_text())
    except OSError:
        return ""
    return listed[1] if listed else ""


def invalid_gpu(visible: str, gpus: Sequence[str]) -> str | None:
    """The first name in a list of visible GPUs that CUDA rejects, and from which on it ignores the list.

    Args:
        visible: A value of `CUDA_VISIBLE_DEVICES`: indices, UUIDs or MIG instances, separated by commas.
        gpus: The UUIDs of the machine's GPUs, from `installed_gpus`.

    Returns:
        The name, also when it is that of a GPU named before; None when all are valid. MIG instances and UUIDs that
        cannot be compared count as valid.
    """
    names = _names(visible)
    for position, name in enumerate(names):
        if name in names[:position] or not _is_gpu(name, gpus):
            return name
    return None


def _names(visible: str) -> list[str]:
    """The names in a value of `CUDA_VISIBLE_DEVICES`."""
    return [name.strip() for name in visible.split(",")]


def _is_gpu(name: str, gpus: Sequence[str]) -> bool:
    """Whether a name is that of a GPU of the machine, as far as its UUIDs are known."""
    is_index = name.isdecimal() and int(name) < len(gpus)
    is_uuid = name.startswith("GPU-") and any(uuid.startswith(name) or not uuid for uuid in gpus)
    return is_index or is_uuid or name.startswith("MIG-")


def describe_invalid(visible: str, gpus: Sequence[str]) -> str:
    """What is wrong with a list of visible GPUs: `"names GPU '7', but this machine has only GPU 0"`.

    Args:
        visible: A list for which `invalid_gpu` returns a name.
        gpus: The UUIDs of the machine's GPUs, from `installed_gpus`.
    """
    invalid = str(invalid_gpu(visible, gpus))
    if _is_gpu(invalid, gpus):
        return f"names GPU {invalid!r} twice"
    return f"names GPU {invalid!r}, but this machine has only {name_gpus(len(gpus))}"


def shows_no_gpu(visible: str, gpus: Sequence[str]) -> bool:
    """Whether CUDA shows no GPU at all to a process with this value of `CUDA_VISIBLE_DEVICES`.

    Args:
        visible: The value.
        gpus: The UUIDs of the machine's GPUs, from `installed_gpus`.
    """
    invalid = invalid_gpu(visible, gpus)
    return invalid is not None and (_names(visible)[0] == invalid or _is_gpu(invalid, gpus))


def explain_missing_gpus(visible: str | None = None) -> MissingGpus | None:
    """Why torch sees no GPU in a process; called where it sees none.

    Args:
        visible: The process's value of `CUDA_VISIBLE_DEVICES`; that of this process when None.

    Returns:
        The explanation; None on a machine without NVIDIA GPUs.
    """
    gpus = installed_gpus()
    if not gpus:
        return None
    import torch

    visible = os.environ.get(VISIBLE) if visible is None else visible
    explain = functools.partial(MissingGpus, name_gpus(len(gpus)))
    if visible is not None and visible.partition(",")[0].strip().lower() in HIDING:
        return explain(f"{VISIBLE} is {visible!r}, which hides all GPUs", f"Unset {VISIBLE}", on_purpose=True)
    if visible is not None and shows_no_gpu(visible, gpus):
        return explain(
            f"{VISIBLE} is {visible!r}, which {describe_invalid(visible, gpus)}",
            f"Set {VISIBLE} to GPUs of this machine, or unset it",
        )
    if torch.version.cuda is None:
        return explain(
            f"torch {torch.__version__} is built without CUDA",
            "Install a torch for CUDA: https://pytorch.org/get-started",
        )
    needed = [*_device_files(), *(DEVICE_FILES / name for name in ("nvidiactl", "nvidia-uvm"))]
    forbidden = [file for file in needed if file.exists() and not os.access(file, os.R_OK | os.W_OK)]
    if forbidden:
        return explain(f"this user may not open {forbidden[0]}", "Ask for the right to read and write it")
    return explain(
        f"torch {torch.__version__} finds no usable GPU with driver {_loaded_driver()}",
        "Update the driver, or install a torch for the CUDA version that nvidia-smi shows; in a job or container, request a GPU",
    )


def name_gpus(count: int) -> str:
    """The words for the GPUs of a machine: `"GPU 0"`, or `"GPUs 0 to 7"`.

    Args:
        count: How many there are.
    """
    return "GPU 0" if count == 1 else f"GPUs 0 to {count - 1}"


def _loaded_driver() -> str:
    """The version of the loaded kernel module, from its file."""
    try:
        version = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", (DRIVER_FILES / "version").read_text())
    except OSError:
        version = None
    return version[0] if version else "of an unknown version"


def gpu_bus_ids(through_library: bool) -> list[tuple[str, str]]:
    """PCI bus id and UUID of each NVIDIA GPU of this machine, in the driver's order.

    Args:
        through_library: Use nvidia-ml-py, which must be installed, rather than the slower `nvidia-smi`.

    Returns:
        For example `[("00000000:3B:00.0", "GPU-7f1e...")]`; empty where they cannot be found out.
    """
    import subprocess

    try:
        return _bus_ids_from_library() if through_library else _bus_ids_from_program()
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _bus_ids_from_program() -> list[tuple[str, str]]:
    pairs = [line.split(",") for line in _query("pci.bus_id,uuid")]
    return [(bus_id.strip(), uuid.strip()) for bus_id, uuid in pairs]


def _bus_ids_from_library() -> list[tuple[str, str]]:
    import pynvml

    def text(value: str | bytes) -> str:
        return value.decode() if isinstance(value, bytes) else value

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        return [
            (text(pynvml.nvmlDeviceGetPciInfo(handle).busId), text(pynvml.nvmlDeviceGetUUID(handle)))
            for handle in handles
        ]
    finally:
        pynvml.nvmlShutdown()


def mig_parents() -> dict[str, str]:
    """The UUID of the GPU of each MIG instance of this machine, by the instance's UUID; empty where there are none."""
    import subprocess

    try:
        lines = subprocess.check_output(["nvidia-smi", "-L"], text=True, stderr=subprocess.DEVNULL).splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    parents, gpu = {}, ""
    for line in lines:  # GPU 0: NVIDIA H200 (UUID: GPU-...), and below it: MIG 1g.18gb Device 0: (UUID: MIG-...)
        uuid = line.rpartition("UUID: ")[2].rstrip(")")
        if uuid.startswith("GPU-"):
            gpu = uuid
        elif uuid.startswith("MIG-"):
            parents[uuid] = gpu
    return parents


def check_cuda_p2p_ib_support() -> bool:
    """False when NCCL must not use peer-to-peer or InfiniBand transfers between this machine's GPUs.

    That is so with several consumer cards of the RTX 40 series under an old driver; True wherever it cannot be found
    out.
    """
    import subprocess

    try:
        names, count = get_gpu_info()
        if count < 2 or not any(SERIES_WITHOUT_P2P in name for name in names):
            return True
        return _as_numbers(get_driver_version()) >= _as_numbers(DRIVER_THAT_KNOWS)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return True


def avoid_unsupported_transfers() -> None:
    """Disable NCCL transfers that this machine's GPUs lack, unless the user has set the variables."""
    switches = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
    if all(name in os.environ for name in switches) or check_cuda_p2p_ib_support():
        return
    for name in switches:
        os.environ.setdefault(name, "1")
    warn_user(
        f"Set {' and '.join(switches)} to 1, because GPUs of the {SERIES_WITHOUT_P2P} series have no peer-to-peer transfers under "
        f"this driver. Update the driver to {DRIVER_THAT_KNOWS} or later, or set both variables yourself."
    )


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


@functools.cache
def check_cuda_fp8_capability() -> bool:
    """True when the current CUDA device computes in 8-bit floats (compute capability 8.9 or later)."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
