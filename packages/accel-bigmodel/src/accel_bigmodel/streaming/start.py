"""Streaming the weights of a dispatched model: what is moved ahead of each module, and how it starts."""

from __future__ import annotations

import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.streaming.lanes import make_lane
from accel_bigmodel.streaming.report import ReportMethod, offloading_hooks
from accel_bigmodel.streaming.settings import Streaming
from accel_bigmodel.streaming.stream import WeightStream
from accel_bigmodel.streaming.units import Unit, make_unit
from accel_ops.files import pages
from accel_state.devices import resolve_device

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accel_bigmodel.hooks.align import AlignDevicesHook


WINDOW_BYTES = 256 << 20
SMALL_BYTES = 1 << 16  # smaller tensors are read with the pages around them
STEP_BYTES = 1 << 23


class ReadAhead:
    """Reads weights in files into memory before modules use them in place.

    It expects modules in the order of the model, and from the second forward pass on in the order in which they
    ran.

    Args:
        units: Hooks and units with weights in files; an iterator is consumed at the first use.
        window_bytes: How many bytes are read ahead.
    """

    def __init__(self, units: Iterable[tuple[AlignDevicesHook, Unit]], window_bytes: int = WINDOW_BYTES) -> None:
        self._units = units
        self._window_bytes = window_bytes
        self._before: AlignDevicesHook | None = None
        self._ahead: dict[AlignDevicesHook, None] = {}  # being read, not yet used
        self._ahead_bytes = 0
        self._touched: set[AlignDevicesHook] = set()
        self._lock = threading.Lock()
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")

    @cached_property
    def _mapped(self) -> dict[AlignDevicesHook, list[torch.Tensor]]:
        """The large weights of each hook."""
        mapped = {hook: _large_mapped(unit) for hook, unit in self._units}
        return {hook: tensors for hook, tensors in mapped.items() if tensors}

    @cached_property
    def _follows(self) -> dict[AlignDevicesHook, AlignDevicesHook]:
        return dict(zip(self.hooks, [*self.hooks[1:], *self.hooks[:1]], strict=True))

    @property
    def hooks(self) -> list[AlignDevicesHook]:
        """The hooks whose weights are read ahead."""
        return list(self._mapped)

    def fetch(self, hook: AlignDevicesHook) -> bool:
        """Start reading the weights that follow; returns False, because the hook fills its slots itself."""
        if hook in self._mapped:
            with self._lock:
                self._read_on_from(hook)
        return False

    def _read_on_from(self, hook: AlignDevicesHook) -> None:
        if next(iter(self._ahead), None) is hook:
            del self._ahead[hook]
            self._ahead_bytes -= self._bytes_of(hook)
        else:  # another order than expected
            self._ahead.clear()
            self._ahead_bytes = 0
        if self._before is not None:
            self._follows[self._before] = hook
        self._before = hook
        last = next(reversed(self._ahead), hook)
        while self._ahead_bytes < self._window_bytes:
            last = self._follows[last]
            if last is hook or last in self._ahead:  # back at the first one
                break
            self._ahead[last] = None
            self._ahead_bytes += self._bytes_of(last)
            self._start_reading(last)

    def release(self, hook: AlignDevicesHook, output: Any) -> Any:
        """Return the output: there is nothing to release."""
        return output

    def __getstate__(self) -> Any:
        return self.hooks, self._window_bytes

    def __setstate__(self, state: Any) -> None:
        hooks, window_bytes = state  # whose own states are not there yet, so their units are made later
        units = ((hook, unit) for hook in hooks if (unit := make_unit("", hook)) is not None)
        ReadAhead.__init__(self, units, window_bytes)

    def _bytes_of(self, hook: AlignDevicesHook) -> int:
        return sum(tensor.numel() for tensor in self._mapped[hook])

    def _start_reading(self, hook: AlignDevicesHook) -> None:
        is_new = hook not in self._touched
        self._touched.add(hook)
        for tensor in self._mapped[hook]:
            if is_new or not pages.is_in_memory(tensor.data_ptr(), tensor.numel()):
                self._helper.submit(_touch, tensor)


def _large_mapped(unit: Unit) -> list[torch.Tensor]:
    """Views of the bytes (uint8, one dimension) of its large weights in files."""
    mapped = [weight.source.detach() for weight in unit.weights if weight.home is None]
    return [tensor.view(-1).view(torch.uint8) for tensor in mapped if tensor.nbytes >= SMALL_BYTES]


def _touch(tensor: torch.Tensor) -> None:
    """Read one byte of each page."""
    for chunk in tensor.split(STEP_BYTES):
        chunk[:: mmap.PAGESIZE].max()


def start_streaming(model: nn.Module, settings: Streaming | None = None) -> None:
    """Prefetch the offloaded weights of a model, on devices that can overlap copies with compute.

    Args:
        model: A model whose hooks offload weights between forward passes; it gets the method `offload_report`.
        settings: Depth and memory budget of prefetching.
    """
    by_device: dict[torch.device, dict[AlignDevicesHook, str]] = {}
    for name, hook in offloading_hooks(model):
        if hook.execution_device is not None:
            by_device.setdefault(resolve_device(hook.execution_device), {})[hook] = name
    for device, names in by_device.items():
        if device.type == "cpu":
            names = _without_used_in_place(names)
        lane = make_lane(device) if names else None
        if lane is not None:
            stream = WeightStream(lane, settings if settings is not None else Streaming(), names)
            for hook in names:
                hook.stream = stream
    model.offload_report = ReportMethod(model)  # type: ignore[assignment]


def _without_used_in_place(names: dict[AlignDevicesHook, str]) -> dict[AlignDevicesHook, str]:
    """The hooks whose weights a CPU has to convert; files of the others, which it uses in place, are read ahead."""
    units = {hook: unit for hook, name in names.items() if (unit := make_unit(name, hook)) is not None}
    in_place = {hook: unit for hook, unit in units.items() if unit.is_used_in_place}
    reader = ReadAhead((hook, unit) for hook, unit in in_place.items() if not unit.is_in_memory)
    for hook in reader.hooks:
        hook.stream = reader
    return {hook: names[hook] for hook in units if hook not in in_place}
