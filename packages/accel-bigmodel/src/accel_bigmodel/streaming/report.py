"""Where the modules of a model are, and what copying offloaded weights to their execution device costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.hooks.hook import hooks_of
from accel_bigmodel.model_methods import ModelMethod
from accel_bigmodel.offload.loader import find_source
from accel_bigmodel.streaming.stream import WeightStream
from accel_bigmodel.streaming.units import Block
from accel_state.devices import resolve_device

HIDDEN_FRACTION = 0.1
"""When compute waits for less than this fraction of the copy time, the copies count as overlapped with compute."""


@dataclass(frozen=True)
class ModuleReport:
    """Consecutive modules of a model that are in one place.

    Args:
        name: Name of the module, or of the first and the last.
        place: Where their weights are: a device, "cpu" or "disk".
        device: Their execution device.
        num_bytes: Size of their weights.
    """

    name: str
    place: str
    device: str
    num_bytes: int


@dataclass(frozen=True)
class BlockReport:
    """A block of weights that is copied to a device for each forward pass, as measured in the last one.

    Args:
        name: Names of its first module and its last.
        place: Where it is offloaded to: "cpu" or "disk".
        device: Its execution device.
        num_bytes: Its size there.
        moved_seconds: Duration of the copy.
        waited_seconds: How long compute was stalled by it.
    """

    name: str
    place: str
    device: str
    num_bytes: int
    moved_seconds: float
    waited_seconds: float

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth of the copy."""
        return self.num_bytes / self.moved_seconds if self.moved_seconds else 0.0


@dataclass(frozen=True)
class OffloadReport:
    """Where a model is and what it waits for; `print` shows it as tables.

    Args:
        modules: Where the weights are, one row for consecutive modules in one place.
        blocks: The copied blocks, in the order in which they first ran.
    """

    modules: Sequence[ModuleReport]
    blocks: Sequence[BlockReport]

    @property
    def verdict(self) -> str:
        """Whether a forward pass is compute-bound or transfer-bound, in one line."""
        if not self.blocks:
            offloaded = [row for row in self.modules if row.place != row.device]
            if not offloaded:
                return "nothing is offloaded"
            if all(torch.device(row.device).type == "cpu" for row in offloaded):
                return "nothing is copied: the CPU uses the weights in place"
            return (
                "not known yet: the first forward pass only records the order of the modules, and copies to an accelerator are "
                "timed once a report was asked for; run another one"
            )
        moved = sum(block.moved_seconds for block in self.blocks)
        waited = sum(block.waited_seconds for block in self.blocks)
        num_bytes = sum(block.num_bytes for block in self.blocks)
        fastest = max(block.bytes_per_second for block in self.blocks)
        if waited <= HIDDEN_FRACTION * moved:
            return f"compute-bound: {_size(num_bytes)} are copied in {_time(moved)}, of which compute waits {_time(waited)}"
        return (
            f"transfer-bound at {num_bytes / max(moved, 1e-9) / 1e9:.1f} of {fastest / 1e9:.1f} GB/s: "
            f"compute waits {_time(waited)} for {_size(num_bytes)}"
        )

    def __str__(self) -> str:
        places = [(row.name, row.place, row.device, _size(row.num_bytes)) for row in self.modules]
        text = _table(("module", "is on", "runs on", "size"), places)
        if self.blocks:
            rows = [
                (
                    block.name,
                    f"{block.place} -> {block.device}",
                    _size(block.num_bytes),
                    _time(block.moved_seconds),
                    f"{block.bytes_per_second / 1e9:.1f} GB/s",
                    _time(block.waited_seconds),
                )
                for block in self.blocks
            ]
            text += "\n\n" + _table(("block", "copied", "size", "in", "at", "waited"), rows)
        return f"{text}\n\n{self.verdict}"


def offload_report(model: nn.Module) -> OffloadReport:
    """Report on a model that was dispatched or offloaded; the same as `model.offload_report()`.

    Args:
        model: The model. Its last forward pass is reported on; the first one only records the order of the modules. Copies
            to accelerators are timed from the first report on, so it shows them after one more pass.
    """
    streams = {hook.stream for _, hook in offloading_hooks(model) if isinstance(hook.stream, WeightStream)}
    for stream in streams:
        stream.lane.start_timing()
    blocks = [_report_on(stream, block) for stream in streams for block in stream.blocks if block.ready]
    return OffloadReport(_module_rows(model), [block for block in blocks if block is not None])


class ReportMethod(ModelMethod):
    """`offload_report` of a model."""

    def __call__(self) -> OffloadReport:
        """Report on the model."""
        return offload_report(self.model)


def _report_on(stream: WeightStream, block: Block) -> BlockReport | None:
    timing = stream.lane.timing(block.arrival)
    if timing is None:
        return None
    place = "cpu" if block.is_in_memory else "disk"
    return BlockReport(
        block.name, place, str(stream.lane.device), block.num_bytes, timing.moved_seconds, timing.waited_seconds
    )


def _module_rows(model: nn.Module) -> list[ModuleReport]:
    """One row for consecutive modules in one place."""
    hooks = dict(offloading_hooks(model))
    rows = []
    for name, module in model.named_modules():
        for place, device, num_bytes in _places_in(module, hooks.get(name)):
            rows.append(ModuleReport(name or "(the model itself)", place, device, num_bytes))
    merged = []
    for (place, device), group in groupby(rows, key=lambda row: (row.place, row.device)):
        members = list(group)
        first, last = members[0].name, members[-1].name
        name = first if first == last else f"{first} ... {last}"
        merged.append(ModuleReport(name, place, device, sum(row.num_bytes for row in members)))
    return merged


def _places_in(module: nn.Module, hook: AlignDevicesHook | None) -> Iterator[tuple[str, str, int]]:
    """Where a module's own tensors are, where they run, and their bytes."""
    offloaded = set()
    device = str(resolve_device(hook.execution_device)) if hook and hook.execution_device is not None else "cpu"
    for slot in (hook.slots or ()) if hook is not None else ():
        assert hook is not None
        source, home = find_source(hook.weights_map, slot.name)
        offloaded.add(slot.name)
        yield "disk" if home is None else "cpu", device, source.numel() * slot.empty.element_size()
    for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        if name not in offloaded and not tensor.is_meta:
            yield str(tensor.device), str(tensor.device), tensor.numel() * tensor.element_size()


def offloading_hooks(model: nn.Module) -> Iterator[tuple[str, AlignDevicesHook]]:
    """The hooks that offload weights, with the names of their modules."""
    for name, module in model.named_modules():
        for hook in hooks_of(module):
            if isinstance(hook, AlignDevicesHook) and hook.offload and hook.slots:
                yield name, hook


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, tuple("-" * width for width in widths), *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
