"""The modules of a model while devices are chosen for them: split, kept in order, allocated, and merged again in a map."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from accel_bigmodel.sizes import convert_file_size_to_int

ModuleOrTensor = nn.Module | torch.Tensor
Map = TypeVar("Map", bound=MutableMapping[str, Any])


def children_of(module: nn.Module, name: str) -> list[tuple[str, ModuleOrTensor]]:
    """The direct children of a module: its own parameters, its child modules and its own buffers."""
    prefix = f"{name}." if name else ""
    children: list[tuple[str, ModuleOrTensor]] = [
        (prefix + key, tensor) for key, tensor in module._parameters.items() if tensor is not None
    ]
    children += [(prefix + key, child) for key, child in module.named_children()]
    children += [(prefix + key, tensor) for key, tensor in module._buffers.items() if tensor is not None]
    return children


def can_be_split(module: Any, no_split: set[str]) -> bool:
    """Whether it is a module with submodules, and of none of the classes that are not split."""
    return isinstance(module, nn.Module) and bool(module._modules) and type(module).__name__ not in no_split


def is_inside(name: str, module: str) -> bool:
    """Whether a name is that of a module, or of a submodule or tensor in it."""
    return name == module or name.startswith(f"{module}.")


def holder_of(name: str, holders: Container[str]) -> str:
    """The innermost of these modules and tensors that a tensor is, or is in; "" when it is in none."""
    while name and name not in holders:
        name = name.rpartition(".")[0]
    return name


class Unplaced:
    """The modules (and single tensors) that have no device yet, in order."""

    def __init__(
        self, modules: Sequence[tuple[str, ModuleOrTensor]], sizes: Mapping[str, int], no_split: set[str]
    ) -> None:
        self._sizes, self._no_split = sizes, no_split
        self._largest: dict[str, int] = {}
        self._set(list(modules))

    def _set(self, modules: list[tuple[str, ModuleOrTensor]]) -> None:
        self._stack: list[
            tuple[str, ModuleOrTensor, int]
        ] = []  # the first one is on top, with the bytes of the largest below it
        self._by_name = dict(modules)
        for name, module in reversed(modules):
            self._push(name, module)

    def _push(self, name: str, module: ModuleOrTensor) -> None:
        below = 0
        if self._stack:
            top, top_module, top_below = self._stack[-1]
            below = max(top_below, self._largest_in(top, top_module))
        self._stack.append((name, module, below))
        self._by_name[name] = module

    def _largest_in(self, name: str, module: ModuleOrTensor) -> int:
        largest = self._largest.get(name)
        if largest is None:
            if can_be_split(module, self._no_split):
                children = module.named_children()  # type: ignore[union-attr]
                largest = max((self._largest_in(f"{name}.{key}", child) for key, child in children), default=0)
            else:
                largest = self._sizes.get(name, 0)
            self._largest[name] = largest
        return largest

    def __bool__(self) -> bool:
        return bool(self._stack)

    def __iter__(self) -> Iterator[tuple[str, ModuleOrTensor]]:
        return ((name, module) for name, module, _ in reversed(self._stack))

    @property
    def first(self) -> tuple[str, ModuleOrTensor]:
        """The module to place next."""
        return self._stack[-1][:2]

    @property
    def largest_later(self) -> int:
        """Bytes of the largest module that is not split, of those after the first one."""
        return self._stack[-1][2]

    def get(self, name: str) -> ModuleOrTensor:
        """A module by its name."""
        return self._by_name[name]

    def replace_first(self, modules: list[tuple[str, ModuleOrTensor]]) -> None:
        """Replace the first module by its children."""
        name, _, _ = self._stack.pop()
        del self._by_name[name]
        for key, module in reversed(modules):
            self._push(key, module)

    def replace(self, name: str, modules: list[tuple[str, ModuleOrTensor]]) -> None:
        """Replace any module by its children."""
        replaced: list[tuple[str, ModuleOrTensor]] = []
        for key, module in self:
            replaced += modules if key == name else [(key, module)]
        self._set(replaced)

    def remove(self, names: list[str]) -> None:
        """Remove modules, of which the first one is one."""
        if len(names) == 1 and names[0] == self._stack[-1][0]:
            self._stack.pop()
            del self._by_name[names[0]]
        else:
            self._set([(key, module) for key, module in self if key not in names])

    def holding(self, tensors: list[str]) -> list[str]:
        """The names of the modules that hold these tensors, each once."""
        names = []
        for tensor in tensors:
            name = holder_of(tensor, self._by_name)
            if name and name not in names:
                names.append(name)
        return names


def fallback_allocate(
    modules: Sequence[tuple[str, ModuleOrTensor]],
    module_sizes: Mapping[str, int],
    size_limit: float | str,
    no_split_module_classes: Sequence[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, ModuleOrTensor | None, list[tuple[str, ModuleOrTensor]]]:
    """Find a module that fits into the free memory, splitting larger ones; modules with tied parameters are skipped.

    Args:
        modules: Names and modules (or tensors), in order.
        module_sizes: Bytes by name.
        size_limit: Free bytes.
        no_split_module_classes: Names of classes whose modules are not split over devices.
        tied_parameters: What `find_tied_parameters` gave.

    Returns:
        Name and module, both None when nothing fits, and all others in order.
    """
    limit = convert_file_size_to_int(size_limit)
    no_split = set(no_split_module_classes or ())
    shared = [name for group in tied_parameters or () for name in group]

    def fits(name: str) -> bool:
        return module_sizes.get(name, 0) <= limit and not any(is_inside(other, name) for other in shared)

    def search(modules: Sequence[tuple[str, ModuleOrTensor]]) -> list[tuple[str, ModuleOrTensor]] | None:
        """The modules with the one that fits moved to the front, and its parents split; None if none fits."""
        for position, (name, module) in enumerate(modules):
            others = [*modules[:position], *modules[position + 1 :]]
            if fits(name):
                return [(name, module), *others]
            if can_be_split(module, no_split):
                inner = search(children_of(module, name))  # type: ignore[arg-type]
                if inner is not None:
                    return [inner[0], *modules[:position], *inner[1:], *modules[position + 1 :]]
        return None

    order = search(modules)
    if order is None:
        return None, None, list(modules)
    return (*order[0], order[1:])


def clean_device_map(device_map: Map, module_name: str = "") -> Map:
    """Name a module instead of all its submodules where these are on one device.

    Args:
        device_map: Device by name; changed in place.
        module_name: The module to begin with.

    Returns:
        The same map.
    """
    prefix = f"{module_name}." if module_name else ""
    inside = {name: device for name, device in device_map.items() if name.startswith(prefix)}
    devices = set(inside.values())
    if len(devices) == 1 and len(inside) > 1:
        for name in inside:
            del device_map[name]
        device_map[module_name] = devices.pop()
        return device_map
    for child in dict.fromkeys(name[len(prefix) :].partition(".")[0] for name in inside if name != module_name):
        if prefix + child not in device_map:
            clean_device_map(device_map, prefix + child)
    return device_map
