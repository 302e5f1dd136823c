"""What an operation costs the host and the device: waits, copies, collectives, bytes; with the line that caused each."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

import torch

from tests.cuda_shapes.software_gpu import SoftwareGpu

aten = torch.ops.aten
COUNTERS = ("stream waits", "event waits", "device waits", "to device", "to host", "within", "kernels", "pinned")
WAITS = (
    "stream waits",
    "device waits",
)  # for events torch's own timers and limits wait: DDP's statistics, FSDP 1's prefetching
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "equal", "bincount"}
MASKED = {"index", "index_put_", "_index_put_impl_"}
DRIVER = ctypes.CDLL(None)


@dataclass
class Report:
    """What one operation did."""

    waits: list[str] = field(default_factory=list)
    """Where the host waited for the device: reads of values, and copies between host and device that block."""
    copies: list[str] = field(default_factory=list)
    """Copies between host and device that do not block."""
    collectives: list[str] = field(default_factory=list)
    peak_bytes: int = 0
    """GPU memory at the peak, without what was there before."""
    kept_bytes: int = 0
    contexts: list[int] = field(default_factory=list)
    """The GPUs that have a context."""
    note: dict[str, Any] = field(default_factory=dict)
    """What the scenario returned."""
    error: str | None = None
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def origin() -> str:
    """The innermost line of the library on the stack, and the one of whoever waits, if that is another."""
    frame: FrameType | None = sys._getframe(1)
    innermost = None
    while frame is not None:
        path = frame.f_code.co_filename
        if "/packages/" in path:
            return f"{path.split('/src/')[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
        if innermost is None and "/cuda_shapes/" not in path and "_python_dispatch" not in path:
            innermost = f"{path.split('/site-packages/')[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return innermost or "the autograd engine"


def driver_waits() -> int:
    return sum(DRIVER.pretended_count(COUNTERS.index(name)) for name in WAITS)


class Recorder(SoftwareGpu):
    """A software GPU that writes down what is asked of it while `recording`."""

    def __init__(self) -> None:
        super().__init__(self._observe)
        self.report: Report | None = None
        self.native_reads = 0

    @contextmanager
    def recording(self, report: Report) -> Iterator[None]:
        """Fill a report with what happens in the block, on this thread and those of autograd."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        memory, waits = torch.cuda.memory_allocated(), driver_waits()
        self.report, self.native_reads = report, 0
        try:
            yield
        finally:
            self.report = None
            unseen = driver_waits() - waits - self.native_reads
            if unseen > 0:
                report.waits.append(f"{unseen} waits inside torch, seen by the driver only")
            report.peak_bytes = torch.cuda.max_memory_allocated() - memory
            gc.collect()  # of what the operation made: the worker has frozen the rest
            report.kept_bytes = torch.cuda.memory_allocated() - memory
            report.contexts = [index for index in range(8) if DRIVER.pretended_context(index)]

    def _observe(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        report = self.report
        if report is None:
            return
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional"):
            if "wait_tensor" not in name:
                report.collectives.append(f"{name} {_first_tensor(args)} at {origin()}")
        elif name == "_local_scalar_dense":
            if args[0].is_cuda:
                self.native_reads += 1
                report.waits.append(f"{name} at {origin()}")
        elif name in READS:
            if args[0].is_cuda:
                report.waits.append(f"{name} at {origin()}")
        elif name in MASKED and args[0].is_cuda:
            if _waits_for_indices(name, args):
                report.waits.append(f"{name} with a mask, or with indices on the CPU, at {origin()}")
        elif name in ("copy_", "_to_copy"):
            self._copy(report, name, *_ends(name, args, result), bool(_non_blocking(name, args, kwargs)))

    @staticmethod
    def _copy(report: Report, name: str, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        if target.is_cuda == source.is_cuda or "meta" in (target.device.type, source.device.type):
            return
        host = source if target.is_cuda else target
        what = f"{name} {source.device} -> {target.device}, {source.nbytes} bytes, at {origin()}"
        if non_blocking and (host.is_pinned() or target.is_cuda):
            report.copies.append(what)
        else:
            report.waits.append(what)


def _waits_for_indices(name: str, args: Any) -> bool:
    """Whether a kernel must know how many elements a mask chooses, or gets its indices from the CPU."""
    indices = [index for index in args[1] if index is not None]
    if name != "index" and len(indices) == 1 and args[2].numel() == 1 and not args[2].is_cuda:
        return False  # `tensor[mask] = number` is a masked_fill
    return any(not index.is_cuda or index.dtype in (torch.bool, torch.uint8) for index in indices)


def _ends(name: str, args: Any, result: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return (args[0], args[1]) if name == "copy_" else (result, args[0])


def _non_blocking(name: str, args: Any, kwargs: Any) -> Any:
    if name == "copy_":
        return args[2] if len(args) > 2 else kwargs.get("non_blocking")
    return kwargs.get("non_blocking")


def _first_tensor(args: Any) -> str:
    for value in torch.utils._pytree.tree_leaves(args):
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
    return "of nothing"
