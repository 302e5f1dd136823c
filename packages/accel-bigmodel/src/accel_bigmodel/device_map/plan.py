"""Filling devices with a model, part by part, in the order in which the parts run."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accel_bigmodel.budgets import NOT_ACCELERATORS, Device, get_max_memory
from accel_bigmodel.device_map.check import check_tied_parameters_in_config, check_tied_parameters_on_same_device
from accel_bigmodel.device_map.parts import (
    Part,
    Waiting,
    can_be_taken_apart,
    clean_device_map,
    fallback_allocate,
    is_inside,
    parts_of,
)
from accel_bigmodel.sizes import compute_module_sizes
from accel_ops.tied import find_tied_parameters
from accel_state.warning import warn_user

logger = logging.getLogger("accelerate.utils.modeling")


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Device, float | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> OrderedDict[str, Device]:
    """Choose a device for each part of a model: accelerators first, then CPU memory, then the disk.

    On the first accelerator, and in CPU memory, there stays room for the largest of the later parts: those that do
    not fit anywhere else are copied there when they run.

    Args:
        model: The model, which may be on the meta device.
        max_memory: Bytes by device, as for `get_max_memory`.
        no_split_module_classes: Names of classes that are not taken apart, such as blocks with residual connections.
        dtype: What the weights will be turned into, as for `compute_module_sizes`.
        special_dtypes: The same for single tensors.
        verbose (`bool`): Log each decision.
        clean_result (`bool`): Name a module instead of its parts where these are on one device.
        offload_buffers (`bool`): Whether buffers of parts that are not on an accelerator stay with them.
        fallback_allocation (`bool`): When nothing fits on a device in order, look for a later part that does.

    Returns:
        Device by name of module or tensor.
    """
    whole = (
        {no_split_module_classes} if isinstance(no_split_module_classes, str) else set(no_split_module_classes or ())
    )
    limits = get_max_memory(max_memory)
    limits.setdefault("disk", 0)
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    tied = find_tied_parameters(model)
    if check_tied_parameters_in_config(model) and not tied:
        logger.warning(
            "The configuration says that parameters are shared, but none are yet: call model.tie_weights() before the "
            "device map is made, or shared parameters may end up on several devices."
        )
    filling = _Filling(sizes, limits, whole, tied, fallback_allocation, logger.info if verbose else _silent)
    device_map = filling.run(parts_of(model, ""))
    _tell_of_empty_devices(filling)
    if not offload_buffers:
        _check_room_for_buffers(model, device_map, sizes, limits, filling.used, dtype, special_dtypes)
    found = OrderedDict(device_map)
    result = clean_device_map(found) if clean_result else found
    check_tied_parameters_on_same_device(tied, result)
    return result


def _silent(*args: Any) -> None:
    """Take the arguments of a logger, and log nothing."""


@dataclass
class _Filling:
    """The state of filling devices one after the other."""

    sizes: Mapping[str, int]
    limits: Mapping[Device, int]
    whole: set[str]
    tied: list[list[str]]
    fallback: bool
    log: Any
    used: dict[Device, int] = field(default_factory=dict)
    device_map: dict[str, Device] = field(default_factory=dict)
    too_small: dict[Device, str] = field(default_factory=dict)

    def run(self, parts: list[tuple[str, Part]]) -> dict[str, Device]:
        """Place all parts."""
        devices = list(self.limits)
        accelerators = [device for device in devices if device not in NOT_ACCELERATORS]
        self.runs_offloaded = {accelerators[0], "cpu"} if accelerators else {"cpu"}
        self.waiting = Waiting(parts, self.sizes, self.whole)
        self.partners = _partners(self.tied)
        self.devices = iter(devices)
        self.device = next(self.devices)
        while self.waiting:
            self._place_next()
        return self.device_map

    @property
    def room(self) -> int | None:
        """Free bytes on the current device, what must be kept for later parts aside; None without a limit."""
        if self.device == "disk":
            return None
        room = self.limits[self.device] - self.used.get(self.device, 0)
        return room - self.waiting.largest_later if self.device in self.runs_offloaded else room

    def _place_next(self) -> None:
        name, part = self.waiting.first
        size = self.sizes.get(name, 0)
        shared = self._shared_with(name)
        together = size + sum(self.sizes.get(other, 0) for other in shared)
        room = self.room
        if room is None or together <= room:
            self._take([name, *shared], together)
        elif shared and size <= room and self._take_apart_one_of(shared):
            pass  # now only what is really shared has to come along
        elif can_be_taken_apart(part, self.whole) and not (shared and size <= room):
            self.log("%s (%d bytes) does not fit on %s (%d free): taken apart", name, size, self.device, room)
            self.waiting.replace_first(parts_of(part, name))  # type: ignore[arg-type]
        elif not self._fill_gap(room):
            self.log("%s (%d bytes) does not fit on %s (%d free)", name, together, self.device, room)
            self._leave_device(name, together)

    def _leave_device(self, name: str, needed: int) -> None:
        """Go on to the next device, because a part of so many bytes does not fit on this one."""
        if self.device not in self.used:
            kept = self.waiting.largest_later if self.device in self.runs_offloaded else 0
            beside = f" ({kept} of them for running offloaded parts)" if kept else ""
            self.too_small[self.device] = (
                f"{self.limits[self.device]} bytes, where {name} needs {needed + kept}{beside}"
            )
        self.device = next(self.devices)

    def _take(self, names: list[str], size: int) -> None:
        for name in names:
            self.log("%s -> %s", name, self.device)
            self.device_map[name] = self.device
        self.used[self.device] = self.used.get(self.device, 0) + size
        self.waiting.remove(names)

    def _shared_with(self, name: str) -> list[str]:
        """The other waiting parts that hold a parameter of this one."""
        others = self.partners(name)
        if not others:
            return []
        return self.waiting.holding([other for other in others if not is_inside(other, name)])

    def _take_apart_one_of(self, names: list[str]) -> bool:
        """Take a part to pieces that shares a parameter, but is too large to come along."""
        for name in names:
            part = self.waiting.get(name)
            if can_be_taken_apart(part, self.whole):
                self.waiting.replace(name, parts_of(part, name))  # type: ignore[arg-type]
                return True
        return False

    def _fill_gap(self, room: int) -> bool:
        """Where nothing could be placed in order, place a later part that fits, if that is wanted."""
        if not self.fallback or self.device not in self.runs_offloaded or self.used.get(self.device):
            return False
        name, part, rest = fallback_allocate(list(self.waiting), self.sizes, room, sorted(self.whole), self.tied)
        if name is None:
            return False
        self.waiting = Waiting([(name, part), *rest], self.sizes, self.whole)  # type: ignore[list-item]
        return True


def _tell_of_empty_devices(filling: _Filling) -> None:
    """Log on which devices nothing fitted, and how much would have."""
    if filling.too_small:
        listed = "; ".join(f"{device}: {why}" for device, why in filling.too_small.items())
        advice = "" if filling.fallback else ", or try fallback_allocation=True, which looks for smaller parts"
        logger.info("Some devices stay empty for insufficient memory (%s). Allow more there%s.", listed, advice)


def _partners(tied: list[list[str]]) -> Any:
    """A function from the name of a part to the names that its parameters have elsewhere."""
    if not tied:
        return lambda name: []
    by_prefix: dict[str, list[str]] = {}
    for group in tied:
        for member in group:
            prefix = member
            while prefix:
                known = by_prefix.setdefault(prefix, [])
                known += [other for other in group if other != member and other not in known]
                prefix = prefix.rpartition(".")[0]
    return lambda name: by_prefix.get(name, [])


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, Part]],
) -> tuple[int, list[str], list[Part]]:
    """Bytes of a module together with the parts that share parameters with it, which count once.

    Args:
        tied_params: Names that parameters of the module have elsewhere.
        module_size: Bytes of the module alone.
        module_sizes: Bytes by name.
        modules_to_treat: The parts in question.

    Returns:
        The bytes, and names and parts of those that would come along.
    """
    if not tied_params:
        return module_size, [], []
    found = dict(modules_to_treat)
    names = Waiting(modules_to_treat, module_sizes, set()).holding(list(tied_params))
    extra = sum(module_sizes.get(name, 0) for name in names)
    extra -= sum(module_sizes.get(name, 0) for name in set(tied_params) if any(is_inside(name, one) for one in names))
    return module_size + extra, names, [found[name] for name in names]


def _check_room_for_buffers(
    model: nn.Module,
    device_map: Mapping[str, Device],
    sizes: Mapping[str, int],
    limits: Mapping[Device, int],
    used: Mapping[Device, int],
    dtype: str | torch.dtype | None,
    special_dtypes: Mapping[str, str | torch.dtype] | None,
) -> None:
    """Warn when buffers, which stay on accelerators while weights are offloaded, do not fit there."""
    accelerators = [device for device in limits if device not in NOT_ACCELERATORS]
    offloaded = [name for name, device in device_map.items() if device in NOT_ACCELERATORS]
    if not accelerators or not offloaded:
        return
    buffers = compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)
    needed = sum(buffers.get(name, 0) for name in offloaded)
    brought = max(sizes.get(name, 0) for name in offloaded)  # for which there is room on the first one
    free = max(limits[device] - used.get(device, 0) - brought * (device == accelerators[0]) for device in accelerators)
    if needed > max(free, 0):
        warn_user(
            f"The buffers of offloaded parts take {needed} bytes and stay on an accelerator, where only {max(free, 0)} "
            "bytes are left: pass offload_buffers=True to offload them too, or allow less memory for weights."
        )
