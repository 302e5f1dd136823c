"""A fixed buffer of device memory in which blocks of weights are allocated and freed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False, slots=True)
class Region:
    """The device memory of one block.

    Args:
        memory: Its bytes (uint8, one dimension).
        begin: Its first byte in the arena; None when it was allocated outside of it.
        busy_until: Events (see `Lane.mark`) that must have completed before this memory is written.
    """

    memory: torch.Tensor
    begin: int | None = None
    busy_until: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Used:
    """Bytes that were freed while a kernel may still use them."""

    begin: int
    end: int
    marks: tuple[Any, ...]


class Arena:
    """A buffer of fixed size; a block gets the first free range that is large enough.

    Args:
        memory: The buffer (uint8, one dimension).
        busy_until: Events recorded after the last work that uses it.
    """

    def __init__(self, memory: torch.Tensor, busy_until: Iterable[Any] = ()) -> None:
        self._memory = memory
        self._taken: list[tuple[int, int]] = []
        self._used = [_Used(0, memory.numel(), tuple(busy_until))]

    @property
    def num_bytes(self) -> int:
        """Size of the buffer in bytes."""
        return self._memory.numel()

    def take(self, num_bytes: int) -> Region | None:
        """Allocate a region; None when no free range is large enough."""
        begin = 0
        for other_begin, other_end in self._taken:
            if other_begin - begin >= num_bytes:
                break
            begin = other_end
        end = begin + num_bytes
        if end > self.num_bytes:
            return None
        self._taken = sorted([*self._taken, (begin, end)])
        return Region(self._memory[begin:end], begin, self._marks_within(begin, end))

    def give_back(self, region: Region) -> None:
        """Free a region of this arena."""
        assert region.begin is not None
        end = region.begin + region.memory.numel()
        self._taken.remove((region.begin, end))
        if region.busy_until and end > region.begin:
            self._used.append(_Used(region.begin, end, tuple(region.busy_until)))

    def _marks_within(self, begin: int, end: int) -> list[Any]:
        """The events that a writer of this range has to wait for; those of other ranges are kept."""
        marks: list[Any] = []
        uses: list[_Used] = []
        for used in self._used:
            if used.end <= begin or end <= used.begin:
                uses.append(used)
                continue
            marks += used.marks
            if used.begin < begin:
                uses.append(_Used(used.begin, begin, used.marks))
            if end < used.end:
                uses.append(_Used(end, used.end, used.marks))
        self._used = uses
        return marks
