"""Where the parts of a model are, and what copying the offloaded ones to where they run costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.hooks.hook import ModelHook, SequentialHook
from accel_bigmodel.streaming.stream import WeightStream
from accel_bigmodel.streaming.units import Block, find_source

HIDDEN_SHARE = 0.1
"""Of the time that copies take: when computation waits for less, they are as good as hidden behind it."""


@dataclass(frozen=True)
class PartReport:
    """Neighbouring parts of a model that are in one place.

    Args:
        name: Of the part, or of the first and the last.
        place: Where their weights are: a device, "cpu" or "disk".
        device: Where they run.
        num_bytes: What they take.
    """

    name: str
    place: str
    device: str
    num_bytes: int


@dataclass(frozen=True)
class BlockReport:
    """A block of weights that travels for each forward pass, as the last pass had it.

    Args:
        name: Of its first module and its last.
        place: Where it waits: "cpu" or "disk".
        device: Where it runs.
        num_bytes: What it takes there.
        moved_seconds: How long the copy took.
        waited_seconds: How long the computation stood still for it.
    """

    name: str
    place: str
    device: str
    num_bytes: int
    moved_seconds: float
    waited_seconds: float

    @property
    def bytes_per_second(self) -> float:
        """The speed of the copy."""
        return self.num_bytes / self.moved_seconds if self.moved_seconds else 0.0


@dataclass(frozen=True)
class OffloadReport:
    """Where a model is and what it waits for; `print` shows it as tables.

    Args:
        parts: Where everything is, one row for consecutive modules in one place.
        blocks: What travels, in the order in which it first ran.
    """

    parts: Sequence[PartReport]
    blocks: Sequence[BlockReport]

    @property
    def verdict(self) -> str:
        """What a forward pass is bound by, in one line."""
        if not self.blocks:
            travelling = [part for part in self.parts if part.place != part.device]
            if not travelling:
                return "nothing travels"
            if all(torch.device(part.device).type == "cpu" for part in travelling):
                return "nothing is copied: the CPU uses weights where they are"
            return "not known yet: the first forward pass only shows the order of the modules, run another one"
        moved = sum(block.moved_seconds for block in self.blocks)
        waited = sum(block.waited_seconds for block in self.blocks)
        num_bytes = sum(block.num_bytes for block in self.blocks)
        fastest = max(block.bytes_per_second for block in self.blocks)
        if waited <= HIDDEN_SHARE * moved:
            return (
                f"compute-bound: {_size(num_bytes)} travel in {_time(moved)}, of which {_time(waited)} are waited for"
            )
        return (
            f"transfer-bound at {num_bytes / max(moved, 1e-9) / 1e9:.1f} of {fastest / 1e9:.1f} GB/s: "
            f"{_time(waited)} of waiting for {_size(num_bytes)}"
        )

    def __str__(self) -> str:
        places = [(part.name, part.place, part.device, _size(part.num_bytes)) for part in self.parts]
        text = _table(("part", "is on", "runs on", "size"), places)
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
            text += "\n\n" + _table(("block", "travels", "size", "copied in", "at", "waited"), rows)
        return f"{text}\n\n{self.verdict}"


def offload_report(model: nn.Module) -> OffloadReport:
    """Report on a model that was dispatched or offloaded; the same as `model.offload_report()`.

    Args:
        model: The model. Its last forward pass is reported on; the first one only records the order of the modules.
    """
    streams = {hook.stream for _, hook in offloading_hooks(model) if isinstance(hook.stream, WeightStream)}
    blocks = [_report_on(stream, block) for stream in streams for block in stream.blocks if block.ready]
    return OffloadReport(_parts(model), blocks)


def _report_on(stream: WeightStream, block: Block) -> BlockReport:
    timing = stream.lane.timing(block.arrival)
    place = "cpu" if block.is_in_memory else "disk"
    return BlockReport(
        block.name, place, str(stream.lane.device), block.num_bytes, timing.moved_seconds, timing.waited_seconds
    )


def _parts(model: nn.Module) -> list[PartReport]:
    """One row for consecutive modules in one place."""
    hooks = dict(offloading_hooks(model))
    rows = []
    for name, module in model.named_modules():
        for place, device, num_bytes in _places_in(module, hooks.get(name)):
            rows.append(PartReport(name or "(the model itself)", place, device, num_bytes))
    parts = []
    for (place, device), group in groupby(rows, key=lambda row: (row.place, row.device)):
        members = list(group)
        first, last = members[0].name, members[-1].name
        name = first if first == last else f"{first} ... {last}"
        parts.append(PartReport(name, place, device, sum(row.num_bytes for row in members)))
    return parts


def _places_in(module: nn.Module, hook: AlignDevicesHook | None) -> Iterator[tuple[str, str, int]]:
    """Where a module's own tensors are, where they run, and their bytes."""
    offloaded = set()
    for slot in (hook.slots or ()) if hook is not None else ():
        assert hook is not None
        source, home = find_source(hook.weights_map, slot.name)
        offloaded.add(slot.name)
        yield "disk" if home is None else "cpu", str(hook.execution_device), source.numel() * slot.empty.element_size()
    for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        if name not in offloaded and not tensor.is_meta:
            yield str(tensor.device), str(tensor.device), tensor.numel() * tensor.element_size()


def offloading_hooks(model: nn.Module) -> Iterator[tuple[str, AlignDevicesHook]]:
    """The hooks that keep weights elsewhere, with the names of their modules."""
    for name, module in model.named_modules():
        for hook in _flat(getattr(module, "_hf_hook", None)):
            if isinstance(hook, AlignDevicesHook) and hook.offload and hook.slots:
                yield name, hook


def _flat(hook: ModelHook | None) -> Iterator[ModelHook]:
    if isinstance(hook, SequentialHook):
        for inner in hook.hooks:
            yield from _flat(inner)
    elif hook is not None:
        yield hook


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
