"""Loaders, samplers and streams of a program's own: those that yield one process's shard, and classes derived from `DataLoader`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accel_data.samplers import BatchSamplerShard, SkipBatchSampler, batch_sampler_of
from accel_data.streams import SplitStream
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


LIBRARIES = frozenset({"torch", "torchdata", "accel_data"})
"""Whose classes are rebuilt from their arguments."""


def is_derived(loader: Any) -> bool:
    """Whether a loader's class is a program's own."""
    return type(loader) is not DataLoader and type(loader).__module__.partition(".")[0] not in LIBRARIES


def reads_otherwise(loader: Any) -> bool:
    """Whether a loader's class defines what an iteration yields, so that its batches need not match its indices."""
    kind = type(loader)
    return kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator


def with_order_of(loader: DataLoader[Any], ordered: DataLoader[Any]) -> DataLoader[Any]:
    """A copy of a loader, of its class and with its attributes, that reads the samples of another one in its order.

    Args:
        loader: The loader of a program.
        ordered: A loader of torch's class that reads this process's shard.
    """
    copied: Any = object.__new__(type(loader))
    vars(copied).update(vars(loader))
    changed = {"dataset", "sampler", "batch_sampler", "generator"}
    if isinstance(ordered.dataset, IterableDataset):
        changed |= {"batch_size", "drop_last", "collate_fn"}
    if getattr(ordered.dataset, "dataset", None) is loader.dataset and isinstance(ordered.dataset, SplitStream):
        changed.remove("dataset")  # it yields its shard by itself, and the loader may look for its class
    # torch refuses to set these attributes, because its own iterators keep what they began with
    vars(copied).update({name: getattr(ordered, name) for name in changed}, _iterator=None)
    return copied


def check_shard_is_read(loader: Any) -> None:
    """Check, after its first batch, that a derived loader reads this process's shard.

    Raises:
        ValueError: It does not, so that every process would read the same.
    """
    shard = batch_sampler_of(loader)
    while isinstance(shard, SkipBatchSampler):
        shard = shard.batch_sampler
    if isinstance(shard, BatchSamplerShard) and not shard.was_read:
        name = type(loader).__name__
        raise ValueError(
            f"{name} yields batches without reading its batch_sampler, so each of {shard.num_processes} processes would read the same. "
            f"Have {name}.__iter__ call super().__iter__(), or leave the loader out of prepare(), shard it yourself and move its "
            "batches to accelerator.device."
        )
