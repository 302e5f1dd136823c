"""The parts of a model while devices are chosen for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

Part = nn.Module | torch.Tensor


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
