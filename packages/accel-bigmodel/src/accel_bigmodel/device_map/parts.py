"""The modules of a model while devices are chosen for them: taken apart, waiting, allocated, and merged again in a map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from accel_bigmodel.sizes import convert_file_size_to_int

Part = nn.Module | torch.Tensor
Map = TypeVar("Map", bound=MutableMapping[str, Any])


def parts_of(module: nn.Module, name: str) -> list[tuple[str, Part]]:
    """What a module is made of: its own tensors, and its children."""
    prefix = f"{name}." if name else ""
    parts: list[tuple[str, Part]] = [
        (prefix + key, tensor) for key, tensor in module._parameters.items() if tensor is not None
    ]
    parts += [(prefix + key, child) for key, child in module.named_children()]
    parts += [(prefix + key, tensor) for key, tensor in module._buffers.items() if tensor is not None]
    return parts


def can_be_taken_apart(part: Any, whole: set[str]) -> bool:
    """Whether a part is a module with modules inside, of none of the classes that stay whole."""
    return isinstance(part, nn.Module) and bool(part._modules) and type(part).__name__ not in whole


def is_inside(name: str, module: str) -> bool:
    """Whether a name is that of a module or of something in it."""
    return name == module or name.startswith(f"{module}.")


class Waiting:
    """The parts that have no device yet, in order."""

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
            if can_be_taken_apart(part, self._whole):
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
        """Bytes of the largest part, of those that stay whole, after the first one."""
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
    limit = convert_file_size_to_int(size_limit)
    whole = set(no_split_module_classes or ())
    shared = [name for group in tied_parameters or () for name in group]

    def fits(name: str) -> bool:
        return module_sizes.get(name, 0) <= limit and not any(is_inside(other, name) for other in shared)

    def search(parts: Sequence[tuple[str, Part]]) -> list[tuple[str, Part]] | None:
        """The parts, of which the one that fits comes first and those around it are taken apart."""
        for position, (name, part) in enumerate(parts):
            others = [*parts[:position], *parts[position + 1 :]]
            if fits(name):
                return [(name, part), *others]
            if can_be_taken_apart(part, whole):
                inner = search(parts_of(part, name))  # type: ignore[arg-type]
                if inner is not None:
                    return [inner[0], *parts[:position], *inner[1:], *parts[position + 1 :]]
        return None

    found = search(modules)
    if found is None:
        return None, None, list(modules)
    return (*found[0], found[1:])


def clean_device_map(device_map: Map, module_name: str = "") -> Map:
    """Name a module instead of all its parts where these are on one device.

    Args:
        device_map: Device by name; it is changed.
        module_name: Where to begin.

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
