"""Samplers and streams that yield one process's shard, as the program or their library has it: by rank, not as for one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from accel_state.processes import PartialState

Place = tuple[int, int]
"""The index of a shard, and how many there are."""


def is_already_sharded(dataset: Any, samplers: tuple[Any, ...], index: int, count: int) -> bool:
    """Whether a stream, or a sampler of an indexed dataset, yields the shard of one process by itself.

    Args:
        dataset: The dataset of a loader.
        samplers: Its samplers.
        index: The index of the shard that this process reads.
        count: The number of shards.

    Raises:
        ValueError: It yields another shard than that.
    """
    for part in (dataset, *samplers):
        place = _place_of(part, (index, count))
        if place is None:
            continue
        if place != (index, count):
            raise ValueError(
                f"This {type(part).__name__} yields the shard of rank {place[0]} of {place[1]}, but the process that prepares it reads "
                f"shard {index} of {count}, so that samples would be lost or come twice. Shard it for {index} of {count}, or pass "
                "a loader as for one process, which prepare() shards."
            )
        return True
    return False


def _place_of(part: Any, here: Place) -> Place | None:
    """The shard that a sampler or a stream yields; None where it yields everything."""
    if getattr(part, "is_split_for_process", False):
        return here
    for kind in type(part).__mro__:
        place_of = STREAMS.get((kind.__module__.partition(".")[0], kind.__name__))
        if place_of is not None:
            return place_of(part)
    rank, replicas = getattr(part, "rank", None), getattr(part, "num_replicas", None)  # as torch's DistributedSampler
    return (rank, replicas) if isinstance(rank, int) and isinstance(replicas, int) and replicas > 1 else None


def _of_this_process(dataset: Any, replicas: str = "") -> Place | None:
    """Of a library that asks for rank and world by itself; so many neighbouring ranks read the same."""
    state, same = PartialState(), getattr(dataset, replicas, None) or 1
    world = state.num_processes // same
    return (state.process_index // same, world) if world > 1 else None


def _of_datasets(dataset: Any) -> Place | None:
    """The shard that `split_dataset_by_node` chose."""
    split = getattr(dataset, "_distributed", None)
    return (split.rank, split.world_size) if split is not None and split.world_size > 1 else None


def _of_webdataset(dataset: Any) -> Place | None:
    """With `split_by_node` in its pipeline, or in one inside of that."""
    for stage in getattr(dataset, "pipeline", ()):
        name = getattr(stage.func if isinstance(stage, partial) else stage, "__name__", "")
        if name == "split_by_node" or _of_webdataset(stage) is not None:
            return _of_this_process(dataset)
    return None


STREAMS: dict[tuple[str, str], Callable[[Any], Place | None]] = {
    ("datasets", "IterableDataset"): _of_datasets,
    ("litdata", "StreamingDataset"): _of_this_process,
    ("litdata", "_BaseStreamingDatasetWrapper"): _of_this_process,
    ("streaming", "StreamingDataset"): partial(_of_this_process, replicas="replication"),
    ("webdataset", "DataPipeline"): _of_webdataset,
}
"""By library and class, which need not be imported to be recognized: the shard that a stream yields."""
