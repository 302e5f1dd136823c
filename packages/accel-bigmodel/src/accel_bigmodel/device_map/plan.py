"""Choosing a device map: filling the devices with the modules of a model, in the order in which they are defined."""

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
from accel_bigmodel.device_map.modules import (
    ModuleOrTensor,
    Unplaced,
    can_be_split,
    children_of,
    clean_device_map,
    fallback_allocate,
    is_inside,
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
    """Choose a device for each module of a model: accelerators first, then CPU memory, then the disk.

    On the first accelerator, and in CPU memory, room is kept for the largest of the later modules: those that do
    not fit anywhere else are offloaded, and copied there for their forward pass.

    Args:
        model: The model, which may be on the meta device.
        max_memory: Bytes by device, as for `get_max_memory`.
        no_split_module_classes: Names of classes whose modules are not split over devices, such as residual blocks.
        dtype: Dtype to which the weights will be converted, as for `compute_module_sizes`.
        special_dtypes: The same for single tensors, by name.
        verbose (`bool`): Log each decision.
        clean_result (`bool`): Name a module instead of its submodules where these are on one device.
        offload_buffers (`bool`): Whether buffers of offloaded modules are offloaded too.
        fallback_allocation (`bool`): When nothing fits on a device in order, look for a later module that does.

    Returns:
        Device by name of module or tensor.
    """
    no_split = (
        {no_split_module_classes} if isinstance(no_split_module_classes, str) else set(no_split_module_classes or ())
    )
    limits = get_max_memory(max_memory)
    limits.setdefault("disk", 0)
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    tied = find_tied_parameters(model)
    if check_tied_parameters_in_config(model) and not tied:
        logger.warning(
            "The model's config ties weights, but they are not tied yet: call model.tie_weights() before the "
            "device map is made, or tied parameters may end up on several devices."
        )
    filling = _Filling(sizes, limits, no_split, tied, fallback_allocation, logger.info if verbose else lambda *_: None)
    device_map = filling.run(children_of(model, ""))
    _log_empty_devices(filling)
    if not offload_buffers:
        _check_room_for_buffers(model, device_map, sizes, limits, filling.used, dtype, special_dtypes)
    full_map = OrderedDict(device_map)
    result = clean_device_map(full_map) if clean_result else full_map
    check_tied_parameters_on_same_device(tied, result)
    return result


@dataclass
class _Filling:
    """Fills the devices one after the other."""

    sizes: Mapping[str, int]
    limits: Mapping[Device, int]
    no_split: set[str]
    tied: list[list[str]]
    fallback: bool
    log: Any
    used: dict[Device, int] = field(default_factory=dict)
    device_map: dict[str, Device] = field(default_factory=dict)
    too_small: dict[Device, str] = field(default_factory=dict)

    def run(self, modules: list[tuple[str, ModuleOrTensor]]) -> dict[str, Device]:
        """Place all modules."""
        devices = list(self.limits)
        accelerators = [device for device in devices if device not in NOT_ACCELERATORS]
        self.runs_offloaded = {accelerators[0], "cpu"} if accelerators else {"cpu"}
        self.unplaced = Unplaced(modules, self.sizes, self.no_split)
        self.partners = _partners(self.tied)
        self.devices = iter(devices)
        self.device = next(self.devices)
        while self.unplaced:
            self._place_next()
        return self.device_map

    @property
    def room(self) -> int | None:
        """Free bytes on the current device, without those kept for later modules; None without a limit."""
        if self.device == "disk":
            return None
        room = self.limits[self.device] - self.used.get(self.device, 0)
        return room - self.unplaced.largest_later if self.device in self.runs_offloaded else room

    def _place_next(self) -> None:
        name, module = self.unplaced.first
        size = self.sizes.get(name, 0)
        tied_to_it = self._unplaced_tied_to(name)
        together = size + sum(self.sizes.get(other, 0) for other in tied_to_it)
        room = self.room
        if room is None or together <= room:
            self._assign([name, *tied_to_it], together)
        elif tied_to_it and size <= room and self._split_one_of(tied_to_it):
            pass  # now only the tied parameters themselves have to fit too
        elif can_be_split(module, self.no_split) and not (tied_to_it and size <= room):
            self.log("%s (%d bytes) does not fit on %s (%d free): split", name, size, self.device, room)
            self.unplaced.replace_first(children_of(module, name))  # type: ignore[arg-type]
        elif not self._fill_gap(room):
            self.log("%s (%d bytes) does not fit on %s (%d free)", name, together, self.device, room)
            self._leave_device(name, together)

    def _leave_device(self, name: str, needed: int) -> None:
        """Continue with the next device, because a module of `needed` bytes does not fit on this one."""
        if self.device not in self.used:
            reserve = self.unplaced.largest_later if self.device in self.runs_offloaded else 0
            beside = f" ({reserve} of them for running offloaded modules)" if reserve else ""
            self.too_small[self.device] = (
                f"{self.limits[self.device]} bytes, where {name} needs {needed + reserve}{beside}"
            )
        self.device = next(self.devices)

    def _assign(self, names: list[str], size: int) -> None:
        for name in names:
            self.log("%s -> %s", name, self.device)
            self.device_map[name] = self.device
        self.used[self.device] = self.used.get(self.device, 0) + size
        self.unplaced.remove(names)

    def _unplaced_tied_to(self, name: str) -> list[str]:
        """The other unplaced modules that are tied to this one."""
        others = self.partners(name)
        if not others:
            return []
        return self.unplaced.holding([other for other in others if not is_inside(other, name)])

    def _split_one_of(self, names: list[str]) -> bool:
        """Split a tied module that is too large to be placed together with this one."""
        for name in names:
            module = self.unplaced.get(name)
            if can_be_split(module, self.no_split):
                self.unplaced.replace(name, children_of(module, name))  # type: ignore[arg-type]
                return True
        return False

    def _fill_gap(self, room: int) -> bool:
        """Where nothing could be placed in order, choose a later module that fits, if fallback is on."""
        if not self.fallback or self.device not in self.runs_offloaded or self.used.get(self.device):
            return False
        name, module, rest = fallback_allocate(list(self.unplaced), self.sizes, room, sorted(self.no_split), self.tied)
        if name is None:
            return False
        self.unplaced = Unplaced([(name, module), *rest], self.sizes, self.no_split)  # type: ignore[list-item]
        return True


def _log_empty_devices(filling: _Filling) -> None:
    """Log on which devices nothing fitted, and how much memory was needed there."""
    if filling.too_small:
        listed = "; ".join(f"{device}: {why}" for device, why in filling.too_small.items())
        advice = "" if filling.fallback else ", or try fallback_allocation=True, which looks for smaller modules"
        logger.info(
            "Some devices stay empty because of insufficient memory (%s). Increase their max_memory%s.", listed, advice
        )


def _partners(tied: list[list[str]]) -> Any:
    """A function from the name of a module to the names that its tied parameters have in other modules."""
    if not tied:
        return lambda name: []
    by_prefix: dict[str, list[str]] = {}
    for group in tied:
        for member in group:
            prefix = member
            while prefix:
                partners = by_prefix.setdefault(prefix, [])
                partners += [other for other in group if other != member and other not in partners]
                prefix = prefix.rpartition(".")[0]
    return lambda name: by_prefix.get(name, [])


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, ModuleOrTensor]],
) -> tuple[int, list[str], list[ModuleOrTensor]]:
    """Bytes of a module together with the modules that are tied to it; tied parameters count once.

    Args:
        tied_params: Names that parameters of the module have in other modules.
        module_size: Bytes of the module alone.
        module_sizes: Bytes by name.
        modules_to_treat: Names and modules that have no device yet.

    Returns:
        The bytes, and names and modules of those that are tied.
    """
    if not tied_params:
        return module_size, [], []
    modules = dict(modules_to_treat)
    names = Unplaced(modules_to_treat, module_sizes, set()).holding(list(tied_params))
    extra = sum(module_sizes.get(name, 0) for name in names)
    extra -= sum(
        module_sizes.get(name, 0) for name in set(tied_params) if any(is_inside(name, parent) for parent in names)
    )
    return module_size + extra, names, [modules[name] for name in names]


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
    largest = max(sizes.get(name, 0) for name in offloaded)  # for which room is kept on the first accelerator
    free = max(limits[device] - used.get(device, 0) - largest * (device == accelerators[0]) for device in accelerators)
    if needed > max(free, 0):
        warn_user(
            f"The buffers of offloaded modules take {needed} bytes and stay on an accelerator, where only {max(free, 0)} "
            "bytes are left: pass offload_buffers=True to offload them too, or lower max_memory."
        )
