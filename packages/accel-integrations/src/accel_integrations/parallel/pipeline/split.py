"""Where a model is split into stages: a chain of modules, and which of them each stage begins with."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

CHAINS = (nn.ModuleList, nn.Sequential)
"""Containers whose children are called one after the other, each with the output of the one before."""

NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class ModelSplit:
    """A model split into stages.

    Attributes:
        blocks: Names of the modules of the chain, in the order in which they are called.
        starts: For each stage, the index of its first block.
        before: Names of the modules with parameters that are called before the chain; they belong to the first stage.
        after: The same after it; they belong to the last stage.
    """

    blocks: tuple[str, ...]
    starts: tuple[int, ...]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.starts)

    @property
    def split_points(self) -> list[str]:
        """Names of the blocks with which the second and every further stage begin."""
        return [self.blocks[start] for start in self.starts[1:]]

    def last_block(self, stage: int) -> str:
        """The block whose output goes to the next stage."""
        end = self.starts[stage + 1] if stage + 1 < self.num_stages else len(self.blocks)
        return self.blocks[end - 1]

    def stages(self) -> dict[str, int]:
        """The stage of every block, and of what comes before and after them, in this order."""
        ends = (*self.starts[1:], len(self.blocks))
        stages = dict.fromkeys(self.before, 0)
        for stage, (start, end) in enumerate(zip(self.starts, ends, strict=True)):
            stages |= dict.fromkeys(self.blocks[start:end], stage)
        return stages | dict.fromkeys(self.after, self.num_stages - 1)


def split_model(model: nn.Module, num_stages: int, split_points: Sequence[str] | str = "auto") -> ModelSplit:
    """Split a model between the blocks of its longest chain.

    Args:
        model: With a `ModuleList` or `Sequential` of blocks; without one, its children are taken for the chain.
        num_stages: How many stages to make.
        split_points: Names of the blocks with which the second and every further stage begin; `"auto"` keeps the
            largest stage as small as possible, in bytes of parameters.

    Raises:
        ValueError: When there are fewer blocks than stages, or for split points that do not exist, are not in one
            chain, not in order, or of another number.
    """
    if isinstance(split_points, str):
        blocks = _largest_chain(model, num_stages)
        before, after = _around(model, blocks)
        sizes = [_bytes_of(model, [block]) for block in blocks]
        starts = balance(sizes, num_stages, _bytes_of(model, before), _bytes_of(model, after))
        return ModelSplit(blocks, starts, before, after)
    if len(split_points) != num_stages - 1:
        raise ValueError(
            f"split_points={list(split_points)!r} make {len(split_points) + 1} stages, but {num_stages} are needed. "
            f"Name {num_stages - 1} modules, or leave split_points at 'auto'."
        )
    blocks = _chain_of(model, split_points)
    starts = (0, *map(blocks.index, split_points))
    if any(earlier >= later for earlier, later in pairwise(starts)):
        raise ValueError(
            f"split_points={list(split_points)!r} must be in order and leave at least one block for each stage. Choose "
            f"from {_listing(blocks[1:])}."
        )
    return ModelSplit(blocks, starts, *_around(model, blocks))


def balance(sizes: Sequence[int], num_stages: int, before: int = 0, after: int = 0) -> tuple[int, ...]:
    """Distribute blocks over stages so that the largest stage is as small as possible, then all as equal as possible.

    Args:
        sizes: The sizes of the blocks, in order, in bytes.
        num_stages: How many stages to make, each of at least one block.
        before: Bytes that the first stage holds besides its blocks.
        after: Bytes that the last stage holds besides its blocks.

    Returns:
        For each stage, the index of its first block.
    """
    totals = [0]
    for size in sizes:
        totals.append(totals[-1] + size)
    last = num_stages - 1

    def weight(stage: int, start: int, end: int) -> int:
        return totals[end] - totals[start] + (before if stage == 0 else 0) + (after if stage == last else 0)

    # best[end]: the first blocks up to `end` in the stages so far: (largest, sum of squares, starts)
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {
        end: (w := weight(0, 0, end), w * w, (0,)) for end in range(1, len(sizes) + 1)
    }
    for stage in range(1, num_stages):
        longer: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for end in range(stage + 1, len(sizes) + 1):
            longer[end] = min(
                (max(best[start][0], w := weight(stage, start, end)), best[start][1] + w * w, (*best[start][2], start))
                for start in range(stage, end)
            )
        best = longer
    return best[len(sizes)][2]


def _largest_chain(model: nn.Module, num_stages: int) -> tuple[str, ...]:
    """The chain with the most bytes among those with enough blocks; chains inside blocks of others do not count."""
    outer: list[tuple[str, ...]] = []
    for blocks in _chains(model):
        if not any(f"{blocks[0]}.".startswith(f"{block}.") for chain in outer for block in chain):
            outer.append(blocks)
    children: tuple[str, ...] = ()
    if not any(isinstance(child, NEVER_CALLED) for child in model.children()):
        children = tuple(name for name, child in model.named_children() if _has_parameters(child))
    for chains in (outer, [children]):
        if long_enough := [blocks for blocks in chains if len(blocks) >= num_stages]:
            return max(long_enough, key=lambda blocks: _bytes_of(model, blocks))
    longest = max((*outer, children), key=len)
    raise ValueError(
        f"{type(model).__name__} cannot be split into {num_stages} stages: its longest chain of modules has "
        f"{len(longest)} ({_listing(longest) or 'none'}). Use at most as many stages, with fewer processes in pp_size "
        "or fewer stages_per_rank."
    )


def _chains(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """All chains, the outer ones first."""
    for name, module in model.named_modules():
        if isinstance(module, CHAINS) and len(module) > 1:
            prefix = f"{name}." if name else ""
            yield tuple(f"{prefix}{child}" for child, _ in module.named_children())


def _chain_of(model: nn.Module, split_points: Sequence[str]) -> tuple[str, ...]:
    """The chain in which all the split points are."""
    names = [name for name, _ in model.named_modules() if name]
    for point in split_points:
        if point not in names:
            near = difflib.get_close_matches(point, names, n=3, cutoff=0.5)
            raise ValueError(
                f"split_points={list(split_points)!r}: {type(model).__name__} has no module {point!r}. "
                + (f"Did you mean {_listing(near)}?" if near else "Choose from model.named_modules().")
            )
    chains = [*_chains(model), tuple(name for name, _ in model.named_children())]
    for blocks in chains:
        if set(split_points) <= set(blocks):
            return blocks
    raise ValueError(
        f"split_points={list(split_points)!r} are not modules of one chain. Choose them from one of these: "
        f"{'; '.join(_listing(blocks) for blocks in chains)}."
    )


def _around(model: nn.Module, blocks: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The largest modules with parameters outside the chain: those that were registered before it, and after it."""
    before: list[str] = []
    after: list[str] = []
    side = before
    prefixes = {"", *(".".join(blocks[0].split(".")[:depth]) for depth in range(1, blocks[0].count(".") + 1))}

    def walk(prefix: str) -> None:
        nonlocal side
        module = model.get_submodule(prefix)
        for child_name, child in module.named_children():
            name = f"{prefix}.{child_name}" if prefix else child_name
            if name in blocks:
                side = after
            elif name in prefixes or isinstance(child, NEVER_CALLED):
                walk(name)
            elif _has_parameters(child):
                side.append(name)

    walk("")
    return tuple(before), tuple(after)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _bytes_of(model: nn.Module, names: Sequence[str]) -> int:
    tensors = {}
    for name in names:
        module = model.get_submodule(name)
        tensors.update({id(tensor): tensor.nbytes for tensor in (*module.parameters(), *module.buffers())})
    return sum(tensors.values())


def _listing(names: Sequence[str]) -> str:
    shown = [*names[:3], "...", *names[-2:]] if len(names) > 6 else names
    return ", ".join(name if name == "..." else repr(name) for name in shown)
