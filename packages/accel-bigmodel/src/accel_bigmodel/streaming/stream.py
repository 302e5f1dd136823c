"""Prefetches the offloaded weights of a model to one device, block by block, overlapped with compute."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_bigmodel.hooks.offloaded import attributes_of
from accel_bigmodel.streaming.arena import Arena, Region
from accel_bigmodel.streaming.settings import Streaming
from accel_bigmodel.streaming.units import Block, Unit, group_into_blocks, make_unit
from accel_ops.nested import recursively_apply

if TYPE_CHECKING:
    from accel_bigmodel.hooks.align import AlignDevicesHook
    from accel_bigmodel.streaming.lanes import Lane


class WeightStream:
    """Copies weights to a device before the modules that need them run.

    During the first forward pass it only records the order of the modules, which fetch their weights themselves. From then
    on, consecutive modules form blocks, and while one block computes, those that followed it the last time are
    prefetched. When another block follows than expected, that block is copied at once and expected the next time.

    Args:
        lane: Copies blocks to the device.
        settings: Depth and memory budget of prefetching.
        names: The names of the hooked modules.

    Attributes:
        blocks: The blocks made so far.
    """

    def __init__(self, lane: Lane, settings: Streaming, names: dict[AlignDevicesHook, str]) -> None:
        self.lane = lane
        self.settings = settings
        self.blocks: list[Block] = []
        self._names = names
        self._units: dict[AlignDevicesHook, Unit | None] = {}  # None for those that cannot be streamed
        self._recorded: dict[Unit, None] = {}  # in the order in which they ran, not yet in a block
        self._follows: dict[Block, Block] = {}
        self._current: Block | None = None
        self._arena: Arena | None = None
        self._in_arena: dict[Block, None] = {}  # the least recently used first
        self._is_behind = False  # whether a block that should be prefetched is not, for lack of memory
        self._lock = threading.Lock()

    # ---- what hooks call --------------------------------------------------------------------------------------------

    def fetch(self, hook: AlignDevicesHook) -> bool:
        """Put the weights of a module into their slots.

        Returns:
            True if they are there now; otherwise the hook has to copy them itself.
        """
        with self._lock:
            unit = self._unit_of(hook)
            if unit is None or not unit.is_for(hook):
                return False
            block = unit.block or self._record(unit)
            if block is None or not self._ensure_on_device(block, unit):
                return False
            if self._current is not block:
                self._enter(block)
            elif self._is_behind:
                self._prefetch(block)
            for weight, tensor in zip(unit.weights, self._tensors(block)[unit], strict=True):
                weight.slot.tensors[weight.slot.key] = tensor
            block.in_use.add(unit)
            return True

    def release(self, hook: AlignDevicesHook, output: Any) -> Any:
        """Release the weights of a module that has run; its slots are empty again.

        Returns:
            Its output; views of a weight in it are cloned, because the weight's memory will be reused.
        """
        with self._lock:
            unit = self._units.get(hook)
            block = unit.block if unit is not None else None
            if unit is None or block is None or unit not in block.in_use:
                return output
            block.in_use.discard(unit)
            region = block.region
            if region is None:  # it was dropped when a larger arena was allocated
                return output
            if region.begin is not None:
                output = without_views_of(region.memory, output)
            region.busy_until = self.lane.mark(region.busy_until)
            if block is not self._current:
                self._drop_own(block)
            return output

    # ---- recording --------------------------------------------------------------------------------------------------

    def _unit_of(self, hook: AlignDevicesHook) -> Unit | None:
        if hook not in self._units:
            self._units[hook] = make_unit(self._names.get(hook, "?"), hook)
        return self._units[hook]

    def _record(self, unit: Unit) -> Block | None:
        """Record that a unit runs; when it ran before, a forward pass is complete and is grouped into blocks."""
        if unit not in self._recorded:
            self._recorded[unit] = None
            return None
        blocks = group_into_blocks(list(self._recorded), self.settings.block_bytes)
        self._recorded.clear()
        self._follows.update(zip(blocks, [*blocks[1:], blocks[0]], strict=True))
        self.blocks += blocks
        self._current = None
        self._drop_small_arena()
        return unit.block

    # ---- moving -----------------------------------------------------------------------------------------------------

    def _ensure_on_device(self, block: Block, unit: Unit) -> bool:
        """Make sure that a block is on the device with its current values; False while other units use the old ones."""
        while True:
            if block.region is None and not self._start_copy(block, keep=[block]):
                self._begin(block, self._own_region(block))  # the arena has no room beside the blocks in use
            if not block.ready:
                self.lane.wait(block.arrival)
            if not unit.has_changed() and not self._may_be_saved_by_autograd(block):
                return True
            if block.in_use:
                return False
            self._drop(block)

    def _enter(self, block: Block) -> None:
        """Compute has reached another block."""
        before, self._current = self._current, block
        if before is not None:
            self._follows[before] = block
            self._drop_own(before)
        if block in self._in_arena:
            self._in_arena[block] = self._in_arena.pop(block)
        self._prefetch(block)

    def _prefetch(self, block: Block) -> None:
        """Prefetch the blocks that will be needed next."""
        self._is_behind = False
        needed = [block]
        for following in self._next_blocks(block):
            needed.append(following)
            if following.region is not None and self._may_be_saved_by_autograd(following) and not following.in_use:
                self._drop(following)
            if following.region is None and not self._start_copy(following, keep=needed):
                self._is_behind = True
                return

    def _next_blocks(self, block: Block) -> Iterator[Block]:
        """The next blocks, up to the prefetch depth."""
        seen = {block}
        for _ in range(self.settings.depth):
            following = self._follows.get(block)
            if following is None or following in seen:
                return
            seen.add(following)
            yield following
            block = following

    def _may_be_saved_by_autograd(self, block: Block) -> bool:
        """Whether autograd might save weights for backward whose memory in the arena will be overwritten."""
        return torch.is_grad_enabled() and block.region is not None and block.region.begin is not None

    def _start_copy(self, block: Block, keep: list[Block]) -> bool:
        """Start copying a block; False when there is no room beside the blocks in use and those to keep."""
        if torch.is_grad_enabled():
            self._begin(block, self._own_region(block))
            return True
        arena = self._own_arena()
        region = arena.take(block.num_bytes)
        for old in list(self._in_arena):
            if region is not None:
                break
            if not old.in_use and old not in keep:
                self._drop(old)
                region = arena.take(block.num_bytes)
        if region is None:
            return False
        self._in_arena[block] = None
        self._begin(block, region)
        return True

    def _own_arena(self) -> Arena:
        if self._arena is None:
            with torch.inference_mode(False):
                memory = self.lane.allocate(self._arena_bytes())
            self._arena = Arena(memory, self.lane.mark([]))
        return self._arena

    def _arena_bytes(self) -> int:
        return self.settings.arena_bytes([block.num_bytes for block in self.blocks])

    def _drop_small_arena(self) -> None:
        """Free the arena when new blocks need a larger one: now, while no block is about to be used."""
        if self._arena is not None and self._arena.num_bytes < self._arena_bytes():
            for block in list(self._in_arena):
                self._drop(block)
            self._arena = None

    def _own_region(self, block: Block) -> Region:
        with torch.inference_mode(False):
            return Region(self.lane.allocate(block.num_bytes))

    def _begin(self, block: Block, region: Region) -> None:
        for weight in block.weights:
            weight.refresh()
        block.region, block.ready = region, {}
        block.arrival = self.lane.begin(block, region)
        region.busy_until = []

    def _drop(self, block: Block) -> None:
        """Free the device memory of a block; its weights are still in CPU memory or on disk."""
        region = block.region
        if region is None:
            return
        self.lane.settle(block.arrival)
        block.region, block.ready = None, {}
        if block in self._in_arena:
            del self._in_arena[block]
            assert self._arena is not None
            self._arena.give_back(region)

    def _drop_own(self, block: Block) -> None:
        """Free memory outside of the arena, once no unit uses it."""
        if block.region is not None and block.region.begin is None and not block.in_use:
            self._drop(block)

    def _tensors(self, block: Block) -> dict[Unit, list[torch.Tensor]]:
        """The tensors for the slots of each unit, views of the block's memory."""
        if not block.ready:
            assert block.region is not None
            memory = block.region.memory
            with torch.inference_mode(False), torch.no_grad():
                block.ready = {
                    unit: [_like(weight.slot.empty, weight.view(memory)) for weight in unit.weights]
                    for unit in block.units
                }
        return block.ready

    # ---- copies -----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> Any:
        """What the stream was made of: a copy records, packs and prefetches the weights of its own hooks."""
        return self.lane, self.settings, self._names

    def __setstate__(self, state: Any) -> None:
        WeightStream.__init__(self, *state)


def without_views_of(memory: torch.Tensor, output: Any) -> Any:
    """A module's output, in which views of `memory` are cloned; the output itself if there are none."""
    address = memory.untyped_storage().data_ptr()

    def is_view(tensor: torch.Tensor) -> bool:
        return tensor.device == memory.device and tensor.untyped_storage().data_ptr() == address

    def has_views(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return type(value) in (torch.Tensor, nn.Parameter) and is_view(value)
        values = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
        return any(map(has_views, values))

    if not has_views(output):
        return output
    return recursively_apply(lambda tensor: tensor.clone() if is_view(tensor) else tensor, output)


def _like(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value as a parameter with the attributes of the old one, if that is a parameter."""
    if not isinstance(old, nn.Parameter):
        return value
    parameter = nn.Parameter(value, requires_grad=old.requires_grad)
    parameter.__dict__.update(attributes_of(old))
    return parameter
