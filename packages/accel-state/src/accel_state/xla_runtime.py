"""Whether this process trains through torch_xla, found without importing it: that takes many seconds."""

from __future__ import annotations

import functools
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from accel_state.libraries import is_torch_xla_available

HARDWARE = "PJRT_DEVICE"
"""The variable that names the hardware; torch_xla sets it to CPU when it is imported and finds none."""
SPMD = "XLA_USE_SPMD"
"""The variable by which torch_xla knows that one process drives all devices; `use_spmd()` sets it."""
GOOGLE = "0x1ae0"
"""The PCI vendor of TPUs, and of other devices in Google's data centres."""


def _hardware_of_process() -> str | None:
    """What the environment was when the process started."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return os.environ.get(HARDWARE)
    devices = (entry.partition(b"=")[2].decode() for entry in entries if entry.startswith(f"{HARDWARE}=".encode()))
    return next(devices, None)


_chosen: list[str | None] = [os.environ.get(HARDWARE) if "torch_xla" not in sys.modules else _hardware_of_process()]
"""What the user has set, rather than torch_xla."""


def is_wanted() -> bool:
    """Whether torch_xla is installed and its devices are to be used.

    That is so on a machine with a TPU or with AWS Neuron's runtime for torch_xla, where PJRT_DEVICE names the hardware, and
    where the program has chosen SPMD. A machine that merely has the library trains as if it had not.
    """
    if not is_torch_xla_available():
        return False
    if is_spmd():
        return True
    hardware = os.environ.get(HARDWARE)
    if "torch_xla" not in sys.modules:
        _chosen[0] = hardware
    if hardware == "CPU":
        hardware = _chosen[0]
    return bool(hardware) or _has_neuron_runtime() or _has_tpu()


def is_spmd() -> bool:
    """Whether one process drives all devices of torch_xla."""
    return os.environ.get(SPMD, "0").lower() in ("1", "true")


def _has_neuron_runtime() -> bool:
    return find_spec("libneuronxla") is not None


@functools.cache
def _has_tpu() -> bool:
    """Whether torch_xla counts TPU chips; it is asked only where there is a PCI device of their vendor."""
    if not any(_vendor(file) == GOOGLE for file in Path("/sys/bus/pci/devices").glob("*/vendor")):
        return False
    from torch_xla._internal import tpu

    return bool(tpu.num_available_chips() > 0)


def _vendor(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
