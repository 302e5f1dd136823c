"""Which weights were one tensor before hooks took them apart, so that they are one again between forward passes and afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

_ties: Any = WeakIdKeyDictionary()  # of the tensors that modules had before


class Tie:
    """The tensors that took the place of one. Hooks of all modules that had it share this object, and so do copies of them."""

    def __init__(self) -> None:
        self._standing: dict[Any, Callable[[], torch.Tensor | None]] = {}
        self._restored: Callable[[], torch.Tensor | None] = _nothing

    @staticmethod
    def of(original: torch.Tensor) -> Tie:
        """The tie of a tensor that is about to be replaced."""
        tie: Tie = _ties.setdefault(original, Tie())
        return tie

    def standing_in(self, device: Any) -> torch.Tensor | None:
        """The tensor without a value that stands in another module that computes on this device."""
        return self._standing.get(device, _nothing)()

    def stands_in(self, device: Any, tensor: torch.Tensor) -> None:
        """Note the tensor without a value."""
        self._standing[device] = weakref.ref(tensor)

    @property
    def restored(self) -> torch.Tensor | None:
        """The tensor with its value that another module has for good."""
        return self._restored()

    @restored.setter
    def restored(self, tensor: torch.Tensor) -> None:
        self._restored = weakref.ref(tensor)

    def __reduce__(self) -> Any:
        return Tie, ()


def _nothing() -> None:
    """A weak reference to nothing."""
