"""What is prefetched: the weights of a module (a unit), and those of several that run in a row (a block)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_bigmodel.offload.loader import OffloadedWeightsLoader, PrefixedDataset

if TYPE_CHECKING:
    from accel_bigmodel.hooks.align import AlignDevicesHook, WeightSlot
    from accel_bigmodel.streaming.arena import Region

ALIGNMENT = 512  # bytes, so that a view of any dtype may begin there
Home = tuple[MutableMapping[str, torch.Tensor], str]


@dataclass(slots=True)
class Piece:
    """One weight of a unit: where it waits, and where it lies in the unit's block.

    Args:
        slot: The place in the module.
        source: The weight in CPU memory or in a mapped file, any dtype.
        dtype: What it is on the device.
        home: The mapping that holds it in CPU memory, and its name there; None for weights in files.
        offset: Its first byte in the block.
        version: Of the source, when it was read last.
    """

    slot: WeightSlot
    source: torch.Tensor
    dtype: torch.dtype
    home: Home | None
    offset: int = 0
    version: int = -1

    @property
    def num_bytes(self) -> int:
        """What it takes on the device."""
        return self.source.numel() * self.dtype.itemsize

    @property
    def room(self) -> int:
        """What it takes in a block."""
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT

    def view(self, block: torch.Tensor) -> torch.Tensor:
        """Its part of a block's bytes (uint8, one dimension), with its own dtype and shape."""
        part = block[self.offset : self.offset + self.num_bytes]
        return part.view(self.dtype).view(self.source.shape)

    def has_changed(self) -> bool:
        """Whether somebody wrote to the weight, or put another in its place, since it was read."""
        return (self.home is not None and self.home[0][self.home[1]] is not self.source) or (
            _version(self.source) != self.version
        )

    def look_again(self) -> None:
        """Take the weight as it is now."""
        if self.home is not None:
            self.source = self.home[0][self.home[1]]
        self.version = _version(self.source)


@dataclass(eq=False, slots=True)
class Unit:
    """The weights of one hooked module.

    Args:
        name: The module's.
        hook: Its hook.
        pieces: Its weights.
    """

    name: str
    hook: InitVar[AlignDevicesHook]
    pieces: list[Piece]
    block: Block | None = None
    _made_of: tuple[Any, ...] = ()

    def __post_init__(self, hook: AlignDevicesHook) -> None:
        self._made_of = (hook.execution_device, hook.weights_map, hook.slots)

    def is_for(self, hook: AlignDevicesHook) -> bool:
        """Whether the hook still has the device, the weights and the slots that this unit was made of."""
        device, weights, slots = self._made_of
        return hook.execution_device is device and hook.weights_map is weights and hook.slots is slots

    @property
    def room(self) -> int:
        """What it takes in a block."""
        return sum(piece.room for piece in self.pieces)

    @property
    def is_in_memory(self) -> bool:
        """Whether all its weights are in CPU memory."""
        return all(piece.home is not None for piece in self.pieces)

    @property
    def is_used_in_place(self) -> bool:
        """Whether a CPU can compute with the weights where they are."""
        return all(piece.source.dtype == piece.dtype for piece in self.pieces)

    def has_changed(self) -> bool:
        """Whether one of its weights has."""
        return any(piece.has_changed() for piece in self.pieces)


@dataclass(eq=False, slots=True)
class Block:
    """Weights that travel together.

    Args:
        units: In the order in which they run.
    """

    units: Sequence[Unit]
    num_bytes: int = 0
    packed: torch.Tensor | None = None  # its bytes in pinned memory, once it was packed
    region: Region | None = None  # its bytes on the device
    arrival: Any = None  # what the lane knows of the copy
    in_use: set[Unit] = field(default_factory=set)
    ready: dict[Unit, list[torch.Tensor]] = field(default_factory=dict)  # what goes into the slots, in the region

    def __post_init__(self) -> None:
        for unit in self.units:
            unit.block = self
        self.lay_out(self.pieces)

    @property
    def pieces(self) -> Iterator[Piece]:
        """All its weights."""
        return (piece for unit in self.units for piece in unit.pieces)

    @property
    def is_in_memory(self) -> bool:
        """Whether all its weights are in CPU memory."""
        return all(unit.is_in_memory for unit in self.units)

    @property
    def name(self) -> str:
        """Of its first module, and of its last."""
        first, last = self.units[0].name, self.units[-1].name
        return first if first == last else f"{first} ... {last}"

    def lay_out(self, pieces: Iterable[Piece]) -> None:
        """Give each weight its part of the block, in this order."""
        self.num_bytes = 0
        for piece in pieces:
            piece.offset = self.num_bytes
            self.num_bytes += piece.room


def group_into_blocks(units: Sequence[Unit], target_bytes: int) -> list[Block]:
    """Group a sequence of units into blocks. A unit is never split, and CPU memory is not mixed with files.

    Args:
        units: In the order in which they run.
        target_bytes: A block is closed before it would become larger.
    """
    blocks: list[list[Unit]] = []
    for _, run in groupby(units, key=lambda unit: unit.is_in_memory):
        filled = target_bytes
        for unit in run:
            if filled + unit.room > target_bytes:
                blocks.append([])
                filled = 0
            blocks[-1].append(unit)
            filled += unit.room
    return [Block(block) for block in blocks]


def make_unit(name: str, hook: AlignDevicesHook) -> Unit | None:
    """The weights of a hook as a unit.

    Returns:
        None if one of them needs more than a copy (a quantised or a strided one), or is on the device already because
        it is tied to one there.
    """
    pieces = []
    for slot in hook.slots or ():
        source, home = find_source(hook.weights_map, slot.name)
        if not _is_plain(slot.empty, source) or (hook.tied_params_map or {}).get(source.data_ptr()):
            return None
        is_number = source.is_floating_point() or source.is_complex()
        pieces.append(Piece(slot, source, slot.empty.dtype if is_number else source.dtype, home))
    return Unit(name, hook, pieces) if pieces else None


def _is_plain(old: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        type(old) in (nn.Parameter, torch.Tensor)
        and type(source) in (nn.Parameter, torch.Tensor)
        and source.device.type == "cpu"
        and source.is_contiguous()
        and source.shape == old.shape
        and source.dtype != torch.int8  # its scales travel beside it
    )


def find_source(weights: Mapping[str, torch.Tensor], name: str) -> tuple[torch.Tensor, Home | None]:
    """A weight as it waits, perhaps of another dtype than the one in which it is used, and who holds it in memory."""
    while isinstance(weights, PrefixedDataset):
        name = f"{weights.prefix}{name}"
        weights = weights.dataset
    if isinstance(weights, OffloadedWeightsLoader):
        if name not in weights.state_dict:
            return weights.stored(name), None
        weights = weights.state_dict
    return weights[name], (weights, name) if isinstance(weights, MutableMapping) else None


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
