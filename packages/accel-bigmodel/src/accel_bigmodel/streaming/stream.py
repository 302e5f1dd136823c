"""Prefetches the offloaded weights of a model to one device, block by block, overlapped with compute."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from accel_bigmodel.streaming.arena import Arena, Region
from accel_bigmodel.streaming.settings import Streaming
from accel_bigmodel.streaming.units import Block, Unit, group_into_blocks, make_unit
from accel_ops.nested import recursively_apply

if TYPE_CHECKING:
    from accel_bigmodel.hooks.align import AlignDevicesHook
    from accel_bigmodel.streaming.lanes import Lane


class WeightStream:
    """Copies weights to a device before the modules that need them run.

    During the first pass it only watches in which order modules run, and they fetch their weights themselves. From then
    on modules that run in a row form blocks, and while one block computes, those that followed it the last time are
    prefetched. When another block follows than expected, that block is copied at once and remembered for the next time.

    Args:
        lane: Copies blocks to the device.
        settings: How far ahead, and how much memory.
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
        self._watched: dict[Unit, None] = {}  # in the order in which they ran, not yet in a block
        self._follows: dict[Block, Block] = {}
        self._current: Block | None = None
        self._arena: Arena | None = None
        self._in_arena: dict[Block, None] = {}  # those used last at the end
        self._is_behind = False  # whether something that should be on its way is not
        self._lock = threading.Lock()

    # ---- what hooks call --------------------------------------------------------------------------------------------

    def fetch(self, hook: AlignDevicesHook) -> bool:
        """Put the weights of a module into their slots.

        Returns:
            Whether they are there now; otherwise the hook has to copy them itself.
        """
        with self._lock:
            unit = self._unit_of(hook)
            if unit is None or not unit.is_for(hook):
                return False
            block = unit.block or self._watch(unit)
            if block is None or not self._bring(block, unit):
                return False
            if self._current is not block:
                self._enter(block)
            elif self._is_behind:
                self._look_ahead(block)
            for piece, tensor in zip(unit.pieces, self._tensors(block, unit), strict=True):
                piece.slot.tensors[piece.slot.key] = tensor
            block.in_use.add(unit)
            return True

    def release(self, hook: AlignDevicesHook, output: Any) -> Any:
        """A module has run, and its slots are empty again.

        Returns:
            Its output; what of it is a view of a weight is copied, because the weight's memory will be used again.
        """
        with self._lock:
            unit = self._units.get(hook)
            block = unit.block if unit is not None else None
            if unit is None or block is None or unit not in block.in_use:
                return output
            block.in_use.discard(unit)
            region = block.region
            if region is None:  # it was sent away when a larger arena was made
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

    def _watch(self, unit: Unit) -> Block | None:
        """Note that a unit runs; when it was seen before, a pass is complete and is grouped into blocks."""
        if unit not in self._watched:
            self._watched[unit] = None
            return None
        blocks = group_into_blocks(list(self._watched), self.settings.block_bytes)
        self._watched.clear()
        self._follows.update(zip(blocks, [*blocks[1:], blocks[0]], strict=True))
        self.blocks += blocks
        self._current = None
        return unit.block

    # ---- moving -----------------------------------------------------------------------------------------------------

    def _bring(self, block: Block, unit: Unit) -> bool:
        """See that a block is on the device, as it is now; False when others still use what it was before."""
        while True:
            if block.region is None and not self._send(block, keep=[block]):
                self._begin(block, self._own_region(block))  # what is in use leaves no room for it
            if not block.ready:
                self.lane.wait(block.arrival)
            if not unit.has_changed() and not self._is_forbidden(block):
                return True
            if block.in_use:
                return False
            self._drop(block)

    def _enter(self, block: Block) -> None:
        """Computation has come to another block."""
        before, self._current = self._current, block
        if before is not None:
            self._follows[before] = block
            self._drop_own(before)
        if block in self._in_arena:
            self._in_arena[block] = self._in_arena.pop(block)
        self._look_ahead(block)

    def _look_ahead(self, block: Block) -> None:
        """Prefetch the blocks that will be needed next."""
        self._is_behind = False
        needed = [block]
        for coming in self._coming(block):
            needed.append(coming)
            if coming.region is not None and self._is_forbidden(coming) and not coming.in_use:
                self._drop(coming)
            if coming.region is None and not self._send(coming, keep=needed):
                self._is_behind = True
                return

    def _coming(self, block: Block) -> Iterator[Block]:
        """The blocks that follow, as far as one looks ahead."""
        seen = {block}
        for _ in range(self.settings.depth):
            following = self._follows.get(block)
            if following is None or following in seen:
                return
            seen.add(following)
            yield following
            block = following

    def _is_forbidden(self, block: Block) -> bool:
        """Whether autograd might keep weights that lie where others will be written."""
        return torch.is_grad_enabled() and block.region is not None and block.region.begin is not None

    def _send(self, block: Block, keep: list[Block]) -> bool:
        """Begin to copy a block; False when there is no room beside what is in use and what is to be kept."""
        if torch.is_grad_enabled():
            self._begin(block, self._own_region(block))
            return True
        arena = self._roomy_arena()
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

    def _roomy_arena(self) -> Arena:
        """The arena, made or made anew when blocks have come that need a larger one."""
        wanted = self.settings.arena_bytes([block.num_bytes for block in self.blocks])
        if self._arena is None or self._arena.num_bytes < wanted:
            for block in list(self._in_arena):
                self._drop(block)
            self._arena = None  # its memory, before other memory is asked for
            with torch.inference_mode(False):
                memory = self.lane.allocate(wanted)
            self._arena = Arena(memory, self.lane.mark([]))
        return self._arena

    def _own_region(self, block: Block) -> Region:
        with torch.inference_mode(False):
            return Region(self.lane.allocate(block.num_bytes))

    def _begin(self, block: Block, region: Region) -> None:
        for piece in block.pieces:
            piece.look_again()
        block.region, block.ready = region, {}
        block.arrival = self.lane.begin(block, region)
        region.busy_until = []

    def _drop(self, block: Block) -> None:
        """Give the memory of a block back; the weights still are where they came from."""
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
        """Give back memory that was not from the arena, once nobody uses it."""
        if block.region is not None and block.region.begin is None and not block.in_use:
            self._drop(block)

    def _tensors(self, block: Block, unit: Unit) -> list[torch.Tensor]:
        """What goes into the slots of a unit."""
        if unit not in block.ready:
            assert block.region is not None
            memory = block.region.memory
            with torch.inference_mode(False), torch.no_grad():
                block.ready[unit] = [_like(piece.slot.empty, piece.view(memory)) for piece in unit.pieces]
        return block.ready[unit]

    # ---- copies -----------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError(CANNOT_COPY)

    def __reduce__(self) -> NoReturn:
        raise TypeError(CANNOT_COPY)


CANNOT_COPY = (
    "This model's weights are streamed to a device by threads and buffers, which can be neither copied nor pickled: take "
    "its hooks off first (remove_hook_from_submodules), or save its weights (save_model, or "
    "get_state_dict_offloaded_model)."
)


def without_views_of(memory: torch.Tensor, output: Any) -> Any:
    """A module's output, in which tensors that share memory with another one are copied; as it is if there are none."""
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
    """The value as a parameter, if it takes the place of one, with all that is known of that."""
    if not isinstance(old, nn.Parameter):
        return value
    made = nn.Parameter(value, requires_grad=old.requires_grad)
    made.__dict__.update(old.__dict__)
    return made
