"""The device mesh as text: coordinates of every rank, the groups along each dimension, and what each rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from accel_ops.modules import to_local
from accel_state.mesh_axes import SAME_BATCH_AXES

MEANINGS = {
    "pp": "pipeline parallel, consecutive stages",
    "dp_replicate": "data parallel replicas",
    "dp_shard": "data parallel, sharded parameters",
    "cp": "context parallel, sharded sequences (ring)",
    "sp": "sequence parallel, sharded sequences (all-to-all)",
    "tp": "tensor parallel, sharded layers",
}
MAX_COLUMNS = 16  # ranks beside one another
MAX_WIDTH = 100  # of a line that lists groups, except for the first group
MAX_ROWS = 16  # of the table of ranks; more are summed up


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank has in memory.

    Args:
        parameter_bytes: Its shards of the parameters.
        optimizer_bytes: Its shards of the optimizer states.
        model_bytes: Full size of the parameters of which it has a shard.
    """

    parameter_bytes: int
    optimizer_bytes: int
    model_bytes: int


def holding_of(models: Sequence[nn.Module], optimizers: Sequence[object]) -> Holding:
    """What this process holds of prepared models and optimizers, each parameter once."""
    parameters = {id(one): one for model in models for one in model.parameters()}.values()
    states = [state for optimizer in optimizers for state in optimizer.state.values()]  # type: ignore[attr-defined]
    tensors = [value for state in states for value in state.values() if hasattr(value, "element_size")]
    return Holding(
        parameter_bytes=sum(to_local(one).nbytes for one in parameters),
        optimizer_bytes=sum(to_local(one).nbytes for one in tensors),
        model_bytes=sum(_full_shape(one).numel() * one.element_size() for one in parameters),
    )


def _full_shape(parameter: nn.Parameter) -> torch.Size:
    shape: torch.Size = getattr(parameter, "_unpadded_unsharded_size", parameter.shape)  # as FSDP 1 calls it
    return shape


def draw_mesh(sizes: Mapping[str, int], holdings: Sequence[Holding] | None = None) -> str:
    """Draw a mesh.

    Args:
        sizes: Processes along every axis, the slowest varying axis first; axes of size 1 are left out.
        holdings: What each process holds, by rank.

    Returns:
        Lines of text: the ranks at their coordinates, the groups along every axis, what each rank reads and holds.

    Example:
        ```python
        print(draw_mesh({"dp_shard": 2, "tp": 2}))
        ```
    """
    used = {axis: size for axis, size in sizes.items() if size > 1}
    world = math.prod(used.values())
    if world == 1:
        parts = ["One process, no parallelism."]
    else:
        shape = " x ".join(f"{axis} {size}" for axis, size in used.items())
        parts = [f"{world} processes: {shape}", "\n".join(_grid(used)), "\n".join(_groups(used))]
    if holdings is not None:
        parts.append("\n".join(_table(used, holdings)))
    return "\n\n".join(parts)


# ---- ranks at their coordinates -------------------------------------------------------------------------------------


def _grid(sizes: Mapping[str, int]) -> Iterator[str]:
    """Rows of ranks: the fastest axis runs to the right, the others downwards."""
    *down, across = sizes
    columns = sizes[across]
    width = len(str(math.prod(sizes.values()) - 1)) + 2
    widths = [max(len(axis), len(str(sizes[axis] - 1))) for axis in down]
    margin = " " * sum(one + 2 for one in widths)
    for start in range(0, columns, MAX_COLUMNS):
        shown = range(start, min(start + MAX_COLUMNS, columns))
        heads = "".join(f"{axis:>{one}}  " for axis, one in zip(down, widths, strict=True))
        yield f"{margin}  {across}"
        yield f"{heads}  {''.join(f'{column:>{width}}' for column in shown)}"
        before: tuple[int, ...] = ()
        for row, place in enumerate(product(*(range(sizes[axis]) for axis in down))):
            new = next((i for i, (a, b) in enumerate(zip(place, before, strict=False)) if a != b), 0)
            named = [f"{coordinate:>{one}}  " for coordinate, one in zip(place, widths, strict=True)]
            named[:new] = [" " * len(one) for one in named[:new]]  # the same as above
            before = place
            ranks = "".join(f"{row * columns + column:>{width}}" for column in shown)
            yield f"{''.join(named)}{'|' if down else ' '} {ranks}{_batch(sizes, across, row * columns)}"


def _batch(sizes: Mapping[str, int], across: str, rank: int) -> str:
    """Which batch the ranks of a row read, where all of them read the same and there are several."""
    dividing = [axis for axis in sizes if axis not in SAME_BATCH_AXES]
    if across not in SAME_BATCH_AXES or not dividing:
        return ""
    batch, stride = 0, math.prod(sizes.values())
    for axis, size in sizes.items():
        stride //= size
        if axis in dividing:
            batch = batch * size + rank // stride % size
    return f"   batch {batch}"


def _groups(sizes: Mapping[str, int]) -> Iterator[str]:
    """For every mesh dimension, the groups of ranks along it."""
    width = max(map(len, sizes))
    for axis in sizes:
        groups = [_ranges(group) for group in groups_along(sizes, axis)]
        line = f"{axis:<{width}}  {MEANINGS.get(axis, 'group')}: {groups.pop(0)}"
        while groups and len(f"{line} | {groups[0]}") <= MAX_WIDTH:
            line = f"{line} | {groups.pop(0)}"
        yield f"{line} and {len(groups)} more" if groups else line


def groups_along(sizes: Mapping[str, int], axis: str) -> list[list[int]]:
    """The groups of ranks along one mesh dimension, a list of ranks each.

    Args:
        sizes: Processes along every axis, the slowest varying axis first.
        axis: One of them.
    """
    names = list(sizes)
    stride = math.prod(sizes[name] for name in names[names.index(axis) + 1 :])
    size = sizes[axis]
    firsts = (rank for rank in range(math.prod(sizes.values())) if rank // stride % size == 0)
    return [[first + step * stride for step in range(size)] for first in firsts]


def _ranges(ranks: Sequence[int]) -> str:
    """Short for a list of ranks: "0-3" where they follow each other, else "0 4 8"."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return " ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]} {ranks[1]} .. {ranks[-1]}"


# ---- what each holds ------------------------------------------------------------------------------------------------


def _table(sizes: Mapping[str, int], holdings: Sequence[Holding]) -> Iterator[str]:
    """A line for each rank, or for ranks that follow each other and hold the same."""
    total = _full_model_bytes(sizes, holdings)
    rows = []
    for first, last in _runs(holdings):
        held = holdings[first]
        fraction = f" ({held.parameter_bytes / total:.0%})" if total else ""
        ranks = str(first) if first == last else f"{first}-{last}"
        rows.append((ranks, f"{_size(held.parameter_bytes)}{fraction}", _size(held.optimizer_bytes)))
    heads = ("rank", "parameters", "optimizer state")
    if len(rows) > MAX_ROWS:
        hidden = len(rows) - MAX_ROWS
        rows = rows[:MAX_ROWS]
    else:
        hidden = 0
    widths = [max(len(line[column]) for line in [heads, *rows]) for column in range(len(heads))]
    for line in [heads, *rows]:
        yield "  ".join(f"{text:>{width}}" for text, width in zip(line, widths, strict=True))
    if hidden:
        yield f"and {hidden} more lines"
    yield f"The model has {_size(total)} of parameters."


def _full_model_bytes(sizes: Mapping[str, int], holdings: Sequence[Holding]) -> int:
    """Bytes of all parameters: of one process of each pipeline stage."""
    stages = sizes.get("pp", 1)
    per_stage = max(1, len(holdings) // stages)
    return sum(held.model_bytes for held in holdings[::per_stage])


def _runs(holdings: Sequence[Holding]) -> Iterator[tuple[int, int]]:
    first = 0
    for rank in range(1, len(holdings) + 1):
        if rank == len(holdings) or holdings[rank] != holdings[first]:
            yield first, rank - 1
            first = rank


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
