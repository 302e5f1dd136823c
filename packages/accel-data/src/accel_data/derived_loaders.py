"""Data loaders of classes that programs derive from `DataLoader`: their methods stay, and read this process's shard."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accel_data.batch_shard import BatchSamplerShard
from accel_data.samplers import SkipBatchSampler, batch_sampler_of
from accel_data.split_stream import SplitStream

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
