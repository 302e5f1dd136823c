"""Giving the hooks of a model prefetching streams, one for each device."""

from __future__ import annotations

import torch
from torch import nn

from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.streaming.ahead import ReadAhead
from accel_bigmodel.streaming.lanes import make_lane
from accel_bigmodel.streaming.report import ReportMethod, offloading_hooks
from accel_bigmodel.streaming.settings import Streaming
from accel_bigmodel.streaming.stream import WeightStream
from accel_bigmodel.streaming.units import make_unit
from accel_state.devices import resolve_device


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
