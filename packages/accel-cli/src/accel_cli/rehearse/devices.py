"""Devices to rehearse for: data sheet figures of their makers, dense (without sparsity)."""

from __future__ import annotations

from dataclasses import dataclass

from accel_cli.errors import UsageError, did_you_mean

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device.

    Attributes:
        name: As `--device` takes it.
        memory_bytes: Its memory.
        tflops: Dtype -> peak of matrix multiplications, in 10^12 operations per second.
        memory_gbps: Bandwidth of its memory, in 10^9 bytes per second.
        intra_gbps: What it sends to others of its machine, in 10^9 bytes per second in one direction.
        inter_gbps: What it sends to other machines, in the same unit: its part of the machine's network.
        is_gpu: Whether operations are those of a GPU, where they need other memory than those of the CPU.
    """

    name: str
    memory_bytes: int
    tflops: dict[str, float]
    memory_gbps: float
    intra_gbps: float
    inter_gbps: float
    is_gpu: bool = True

    def peak_flops(self, dtype: str) -> float:
        """Operations per second at the peak, for matrices of a dtype; that of float32 for dtypes without a row."""
        return self.tflops.get(dtype, self.tflops["float32"]) * 1e12


def _half(tflops: float) -> dict[str, float]:
    return {"bfloat16": tflops, "float16": tflops}


_DEVICES = (
    Device("a100", 80 * GIB, {**_half(312), "float32": 19.5}, 2039, 300, 25),
    Device("a100-40", 40 * GIB, {**_half(312), "float32": 19.5}, 1555, 300, 25),
    Device("h100", 80 * GIB, {**_half(989.4), "float32": 66.9}, 3352, 450, 50),
    Device("h200", 141 * 10**9, {**_half(989.4), "float32": 66.9}, 4800, 450, 50),
    Device("b200", 180 * 10**9, {**_half(2250), "float32": 75}, 7700, 900, 50),
    Device("l40s", 48 * 10**9, {**_half(362), "float32": 91.6}, 864, 32, 12.5),
    Device("a10", 24 * 10**9, {**_half(125), "float32": 31.2}, 600, 32, 12.5),
    Device("rtx4090", 24 * 10**9, {**_half(165.2), "float32": 82.6}, 1008, 32, 12.5),
    Device("mi300x", 192 * 10**9, {**_half(1307.4), "float32": 163.4}, 5300, 448, 50),
    Device("cpu", 0, {"bfloat16": 1.0, "float32": 1.0}, 50, 10, 1.25, is_gpu=False),
)
DEVICES: dict[str, Device] = {device.name: device for device in _DEVICES}


def device_named(name: str) -> Device:
    """The row of a device.

    Raises:
        UsageError: There is none.
    """
    if name.lower() not in DEVICES:
        raise UsageError(
            f"--device {name!r} is not in the table.{did_you_mean(name, list(DEVICES))} Choose from {', '.join(DEVICES)}."
        )
    return DEVICES[name.lower()]
