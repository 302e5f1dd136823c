"""The axes of a device mesh, and the shard of the data that a process reads by its coordinates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
"""The axes from the slowest to the fastest varying: consecutive ranks form TP groups, which communicate most."""
SAME_BATCH_AXES = frozenset({"pp", "cp", "sp", "tp"})
"""Processes that differ only along these axes work on the same batch."""


@dataclass(frozen=True, slots=True)
class DataShard:
    """Which shard of the data a process reads.

    Args:
        index: Number of the shard, from 0.
        count: How many shards there are.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"DataShard(index={self.index!r}, count={self.count!r}): index must lie in 0..count-1.")


def data_shard_of(mesh: DeviceMesh) -> DataShard:
    """The shard of the data that this process reads, by its coordinates in a mesh.

    Args:
        mesh: A mesh with named axes. Processes that differ only along "pp", "tp", "cp" or "sp" read the same
            slice; every other axis splits the data, the first one varying slowest.

    Raises:
        ValueError: When the dimensions have no names, or this rank is not in the mesh.
    """
    names, coordinates = mesh.mesh_dim_names, mesh.get_coordinate()
    if not names or coordinates is None:
        problem = "its dimensions have no names" if not names else "this rank is not in it"
        raise ValueError(f"{mesh!r} does not define which slice of the data this process reads: {problem}.")
    index, count = 0, 1
    for axis, (name, coordinate) in enumerate(zip(names, coordinates, strict=True)):
        if name not in SAME_BATCH_AXES:
            index, count = index * mesh.size(axis) + coordinate, count * mesh.size(axis)
    return DataShard(index, count)
