"""Information about NVIDIA GPUs, found out without initializing CUDA."""

from __future__ import annotations

import functools
import os

from accel_state.warning import warn_user

# Consumer cards of this series have no peer-to-peer transfers; from this driver on NCCL detects that itself.
SERIES_WITHOUT_P2P = "RTX 40"
DRIVER_THAT_KNOWS = "550.40.07"


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
