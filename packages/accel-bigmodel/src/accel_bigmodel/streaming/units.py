"""The units of prefetching: the weights of one module (a unit), and those of consecutive modules (a block)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_bigmodel.hooks.offloaded import OffloadedTensor
from accel_bigmodel.offload.loader import Home, find_source

if TYPE_CHECKING:
    from accel_bigmodel.hooks.align import AlignDevicesHook, WeightSlot
    from accel_bigmodel.streaming.arena import Region

ALIGNMENT = 512  # bytes, so that a view of any dtype can start there


@dataclass(slots=True)
class UnitWeight:
    """One weight of a unit: where it is offloaded to, and its offset in the unit's block.

    Args:
        slot: The parameter or buffer of the module.
        source: The weight in CPU memory or in a memory-mapped file, any dtype.
        dtype: Its dtype on the device.
        home: The mapping that holds it in CPU memory, and its key there; None for weights in files.
        offset: Its offset in the block, in bytes.
        version: The version counter of the source when it was read last.
    """

    slot: WeightSlot
    source: torch.Tensor
    dtype: torch.dtype
    home: Home | None
    offset: int = 0
    version: int = -1

    @property
    def num_bytes(self) -> int:
        """Its size on the device."""
        return self.source.numel() * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Its size in a block, in bytes, with padding for alignment."""
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT

    def view(self, block: torch.Tensor) -> torch.Tensor:
        """A view of its bytes in a block (uint8, one dimension), with its own dtype and shape."""
        bytes_of_weight = block[self.offset : self.offset + self.num_bytes]
        return bytes_of_weight.view(self.dtype).view(self.source.shape)

    def has_changed(self) -> bool:
        """Whether the weight was written to or replaced since it was read."""
        return (self.home is not None and self.home[0][self.home[1]] is not self.source) or (
            _version(self.source) != self.version
        )

    def refresh(self) -> None:
        """Take the current weight and its version."""
        if self.home is not None:
            self.source = self.home[0][self.home[1]]
        self.version = _version(self.source)


@dataclass(eq=False, slots=True)
class Unit:
    """The weights of one hooked module.

    Args:
        name: The module's name.
        hook: Its hook.
        weights: Its weights.
    """

    name: str
    hook: InitVar[AlignDevicesHook]
    weights: list[UnitWeight]
    block: Block | None = None
    _made_of: tuple[Any, ...] = ()

    def __post_init__(self, hook: AlignDevicesHook) -> None:
        self._made_of = (hook.execution_device, hook.weights_map, hook.slots)

    def is_for(self, hook: AlignDevicesHook) -> bool:
        """Whether the hook still has the device, the weights and the slots from which this unit was made."""
        device, weights, slots = self._made_of
        return hook.execution_device is device and hook.weights_map is weights and hook.slots is slots

    @property
    def room(self) -> int:
        """Its size in a block, in bytes, with padding for alignment."""
        return sum(weight.room for weight in self.weights)

    @property
    def is_in_memory(self) -> bool:
        """Whether all its weights are in CPU memory."""
        return all(weight.home is not None for weight in self.weights)

    @property
    def is_used_in_place(self) -> bool:
        """Whether a CPU can compute with the weights in place, because no dtype has to be converted."""
        return all(weight.source.dtype == weight.dtype for weight in self.weights)

    def has_changed(self) -> bool:
        """Whether one of its weights has changed."""
        return any(weight.has_changed() for weight in self.weights)


@dataclass(eq=False, slots=True)
class Block:
    """Weights that are copied to the device together.

    Args:
        units: In the order in which they run.
    """

    units: Sequence[Unit]
    num_bytes: int = 0
    packed: torch.Tensor | None = None  # its bytes in pinned memory, once it was packed
    region: Region | None = None  # its bytes on the device
    arrival: Any = None  # the lane's handle of the copy
    in_use: set[Unit] = field(default_factory=set)
    ready: dict[Unit, list[torch.Tensor]] = field(default_factory=dict)  # tensors for the slots, views of the region

    def __post_init__(self) -> None:
        for unit in self.units:
            unit.block = self
        self.lay_out(self.weights)

    @property
    def weights(self) -> Iterator[UnitWeight]:
        """All its weights."""
        return (weight for unit in self.units for weight in unit.weights)

    @property
    def is_in_memory(self) -> bool:
        """Whether all its weights are in CPU memory."""
        return all(unit.is_in_memory for unit in self.units)

    @property
    def name(self) -> str:
        """Names of its first module and its last."""
        first, last = self.units[0].name, self.units[-1].name
        return first if first == last else f"{first} ... {last}"

    def lay_out(self, weights: Iterable[UnitWeight]) -> None:
        """Assign each weight its offset in the block, in this order."""
        self.num_bytes = 0
        for weight in weights:
            weight.offset = self.num_bytes
            self.num_bytes += weight.room


def group_into_blocks(units: Sequence[Unit], target_bytes: int) -> list[Block]:
    """Group a sequence of units into blocks. A unit is never split, and weights in CPU memory and in files are not mixed.

    Args:
        units: In the order in which they run.
        target_bytes: Largest size of a block of several units.
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
    weights = []
    for slot in hook.slots or ():
        source, home = find_source(hook.weights_map, slot.name)
        if not _is_plain(slot.empty, source) or (hook.tied_params_map or {}).get(source.data_ptr()):
            return None
        weights.append(UnitWeight(slot, source, slot.empty.dtype, home))
    return Unit(name, hook, weights) if weights else None


def _is_plain(old: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        type(old) in (nn.Parameter, torch.Tensor, OffloadedTensor)
        and type(source) in (nn.Parameter, torch.Tensor)
        and source.device.type == "cpu"
        and source.is_contiguous()
        and source.shape == old.shape
        and source.dtype != torch.int8  # which needs its scales too
    )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
