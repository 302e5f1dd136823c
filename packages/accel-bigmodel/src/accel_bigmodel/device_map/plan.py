"""Filling devices with a model, part by part, in the order in which the parts run."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accel_bigmodel.budgets import NOT_ACCELERATORS, Device, get_max_memory
from accel_bigmodel.device_map.clean import clean_device_map
from accel_bigmodel.sizes import compute_module_sizes
from accel_bigmodel.tied import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
)

logger = logging.getLogger(__name__)

Part = nn.Module | torch.Tensor


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
    """Choose a device for each part of a model: accelerators first, then main memory, then the disk.

    On the first accelerator, and in main memory, there stays room for the largest of the parts to come: those that do
    not fit anywhere else have to be brought there when they run.

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
    device_map = filling.run(_parts_of(model, ""))
    if not offload_buffers:
        _check_room_for_buffers(model, device_map, sizes, limits, filling.used, dtype, special_dtypes)
    found = OrderedDict(device_map)
    result = clean_device_map(found) if clean_result else found
    check_tied_parameters_on_same_device(tied, result)
    return result


def _silent(*args: Any) -> None:
    """Log nothing."""


def _parts_of(module: nn.Module, name: str) -> list[tuple[str, Part]]:
    """What a module is made of: its own tensors, and its children."""
    prefix = f"{name}." if name else ""
    parts: list[tuple[str, Part]] = [
        (prefix + key, tensor) for key, tensor in module._parameters.items() if tensor is not None
    ]
    parts += [(prefix + key, child) for key, child in module.named_children()]
    parts += [(prefix + key, tensor) for key, tensor in module._buffers.items() if tensor is not None]
    return parts


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

    def run(self, parts: list[tuple[str, Part]]) -> dict[str, Device]:
        """Place all parts."""
        devices = list(self.limits)
        accelerators = [device for device in devices if device not in NOT_ACCELERATORS]
        self.brought_to = {accelerators[0], "cpu"} if accelerators else {"cpu"}
        self.waiting = _Waiting(parts, self.sizes, self.whole)
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
        return room - self.waiting.largest_later if self.device in self.brought_to else room

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
        elif _can_be_taken_apart(part, self.whole) and not (shared and size <= room):
            self.log("%s (%d bytes) does not fit on %s (%d free): taken apart", name, size, self.device, room)
            self.waiting.replace_first(_parts_of(part, name))  # type: ignore[arg-type]
        elif not self._fill_gap(room):
            self.log("%s (%d bytes) does not fit on %s (%d free)", name, together, self.device, room)
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
        return self.waiting.holding([other for other in others if not _is_inside(other, name)])

    def _take_apart_one_of(self, names: list[str]) -> bool:
        """Take a part to pieces that shares a parameter, but is too large to come along."""
        for name in names:
            part = self.waiting.get(name)
            if _can_be_taken_apart(part, self.whole):
                self.waiting.replace(name, _parts_of(part, name))  # type: ignore[arg-type]
                return True
        return False

    def _fill_gap(self, room: int) -> bool:
        """Where nothing could be placed in order, place a later part that fits, if that is wanted."""
        if not self.fallback or self.device not in self.brought_to or self.used.get(self.device):
            return False
        name, part, rest = fallback_allocate(list(self.waiting), self.sizes, room, sorted(self.whole), self.tied)
        if name is None:
            return False
        self.waiting = _Waiting([(name, part), *rest], self.sizes, self.whole)  # type: ignore[list-item]
        return True


def _can_be_taken_apart(part: Any, whole: set[str]) -> bool:
    return isinstance(part, nn.Module) and bool(part._modules) and type(part).__name__ not in whole


def _is_inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


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


class _Waiting:
    """The parts that have no device yet, in order.

    Attributes:
        largest_later (`int`): Bytes of the largest part, of those that stay whole, after the first one.
    """

    def __init__(self, parts: Sequence[tuple[str, Part]], sizes: Mapping[str, int], whole: set[str]) -> None:
        self._sizes, self._whole = sizes, whole
        self._largest: dict[str, int] = {}
        self._set(list(parts))

    def _set(self, parts: list[tuple[str, Part]]) -> None:
        self._stack: list[tuple[str, Part, int]] = []  # the first one is on top; with the largest below it
        self._by_name = dict(parts)
        for name, part in reversed(parts):
            self._push(name, part)

    def _push(self, name: str, part: Part) -> None:
        below = 0
        if self._stack:
            top, top_part, top_below = self._stack[-1]
            below = max(top_below, self._largest_in(top, top_part))
        self._stack.append((name, part, below))
        self._by_name[name] = part

    def _largest_in(self, name: str, part: Part) -> int:
        found = self._largest.get(name)
        if found is None:
            if _can_be_taken_apart(part, self._whole):
                children = part.named_children()  # type: ignore[union-attr]
                found = max((self._largest_in(f"{name}.{key}", child) for key, child in children), default=0)
            else:
                found = self._sizes.get(name, 0)
            self._largest[name] = found
        return found

    def __bool__(self) -> bool:
        return bool(self._stack)

    def __iter__(self) -> Iterator[tuple[str, Part]]:
        return ((name, part) for name, part, _ in reversed(self._stack))

    @property
    def first(self) -> tuple[str, Part]:
        """The part to place next."""
        return self._stack[-1][:2]

    @property
    def largest_later(self) -> int:
        return self._stack[-1][2]

    def get(self, name: str) -> Part:
        """A part by its name."""
        return self._by_name[name]

    def replace_first(self, parts: list[tuple[str, Part]]) -> None:
        """Put pieces in the place of the first part."""
        name, _, _ = self._stack.pop()
        del self._by_name[name]
        for key, part in reversed(parts):
            self._push(key, part)

    def replace(self, name: str, parts: list[tuple[str, Part]]) -> None:
        """Put pieces in the place of any part."""
        pieces: list[tuple[str, Part]] = []
        for key, part in self:
            pieces += parts if key == name else [(key, part)]
        self._set(pieces)

    def remove(self, names: list[str]) -> None:
        """Forget parts; the first one is among them."""
        if len(names) == 1 and names[0] == self._stack[-1][0]:
            self._stack.pop()
            del self._by_name[names[0]]
        else:
            self._set([(key, part) for key, part in self if key not in names])

    def holding(self, tensors: list[str]) -> list[str]:
        """The parts that hold these tensors, each once."""
        found = []
        for tensor in tensors:
            name = tensor
            while name and name not in self._by_name:
                name = name.rpartition(".")[0]
            if name and name not in found:
                found.append(name)
        return found


def fallback_allocate(
    modules: Sequence[tuple[str, Part]],
    module_sizes: Mapping[str, int],
    size_limit: float | str,
    no_split_module_classes: Sequence[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, Part | None, list[tuple[str, Part]]]:
    """Find a part that fits into what is left, taking larger ones apart; parts that share parameters are left alone.

    Args:
        modules: Names and parts, in order.
        module_sizes: Bytes by name.
        size_limit: Bytes that are left.
        no_split_module_classes: Names of classes that are not taken apart.
        tied_parameters: What `find_tied_parameters` gave.

    Returns:
        Name and part, both None when nothing fits, and all other parts in order.
    """
    from accel_bigmodel.sizes import convert_file_size_to_int

    limit = convert_file_size_to_int(size_limit)
    whole = set(no_split_module_classes or ())
    shared = [name for group in tied_parameters or () for name in group]

    def fits(name: str) -> bool:
        return module_sizes.get(name, 0) <= limit and not any(_is_inside(other, name) for other in shared)

    def search(parts: Sequence[tuple[str, Part]]) -> list[tuple[str, Part]] | None:
        """The parts, of which the one that fits comes first and those around it are taken apart."""
        for position, (name, part) in enumerate(parts):
            others = [*parts[:position], *parts[position + 1 :]]
            if fits(name):
                return [(name, part), *others]
            if _can_be_taken_apart(part, whole):
                inner = search(_parts_of(part, name))  # type: ignore[arg-type]
                if inner is not None:
                    return [inner[0], *parts[:position], *inner[1:], *parts[position + 1 :]]
        return None

    found = search(modules)
    if found is None:
        return None, None, list(modules)
    return (*found[0], found[1:])


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, Part]],
) -> tuple[int, list[str], list[Part]]:
    """Bytes of a module together with the parts that share parameters with it.

    Args:
        tied_params: Names, elsewhere, of parameters of the module.
        module_size: Bytes of the module alone.
        module_sizes: Bytes by name.
        modules_to_treat: The parts in question.

    Returns:
        The bytes, and names and parts of those that would come along.
    """
    if not tied_params:
        return module_size, [], []
    found = dict(modules_to_treat)
    names = _Waiting(modules_to_treat, module_sizes, set()).holding(list(tied_params))
    extra = sum(module_sizes.get(name, 0) for name in names)
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
        import warnings

        warnings.warn(
            f"The buffers of offloaded parts take {needed} bytes and stay on an accelerator, where only {max(free, 0)} "
            "bytes are left: pass offload_buffers=True to offload them too, or allow less memory for weights.",
            stacklevel=3,
        )
