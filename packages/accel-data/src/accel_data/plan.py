"""`LoaderPlan`: the arguments of `prepare_data_loader` with their defaults resolved, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from accel_data.samplers import SeedableRandomSampler, batch_sampler_of, get_sampler
from accel_state.mesh_axes import data_shard_of
from accel_state.processes import PartialState
from accel_state.warning import warn_user


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPlan:
    """The arguments of `prepare_data_loader`, with defaults resolved.

    Attributes:
        dataloader: The loader, as for one process.
        device: Device of batches; None does not move them.
        num_processes: The number of shards of the dataset.
        process_index: The index of this process's shard.
        split_batches: Whether a batch of `dataloader` is the global batch, of all processes together.
        rng_types: Kinds of random generators to synchronize when an iteration begins.
        is_dispatched: Whether only the main process reads and the others receive.
        even_batches: Whether all processes get the same number of batches, padded with repeated samples if necessary.
        slice_fn: Slices a global batch into local ones; None for the default.
        sampler: The sampler of single indices, seedable if that was asked for.
        is_seedable: Whether a seedable sampler was asked for.
        non_blocking: Whether the host goes on before a batch is copied to the device also where it is not in pinned memory.
        use_stateful_dataloader: Whether to read through torchdata's `StatefulDataLoader`.
        mesh: The device mesh; ranks that differ only along its tensor, context or sequence dimension read the same.
        split: The shard of a stream that is sharded at its source; None for other data.
        is_already_sharded: Whether the loader yields this process's shard already.

    Raises:
        ValueError: For arguments that cannot be combined, an empty dataset, or a batch that cannot be sharded evenly.
    """

    dataloader: DataLoader[Any]
    device: torch.device | None
    num_processes: int
    process_index: int
    split_batches: bool
    rng_types: list[Any] | None
    is_dispatched: bool
    even_batches: bool
    slice_fn: Callable[..., Any] | None
    sampler: Any
    is_seedable: bool
    non_blocking: bool
    use_stateful_dataloader: bool
    mesh: Any
    split: Any
    is_already_sharded: bool

    def __post_init__(self) -> None:
        if self.is_dispatched and self.device is None:
            raise ValueError(
                "dispatch_batches=True sends batches to the devices, so it cannot be combined with "
                "put_on_device=False. Leave device_placement on, or set dispatch_batches=False."
            )
        if self.is_already_sharded and self.num_processes > 1 and (self.is_dispatched or self.split_batches):
            option = (
                "dispatch_batches=True reads on the main process only"
                if self.is_dispatched
                else "split_batches=True splits batches"
            )
            raise ValueError(
                f"{option}, but this data loader yields each process's own shard already. Leave that option out, or prepare a data "
                "loader as for one process."
            )
        if not self.is_stream:
            _check_indexed(self)
        if self.split_batches:
            _check_divisible(self.dataloader, self.num_processes)

    @property
    def is_stream(self) -> bool:
        """Whether the dataset is an `IterableDataset`."""
        return isinstance(self.dataloader.dataset, IterableDataset)

    @property
    def is_sharded(self) -> bool:
        """Whether other processes read the same dataset, this process's shard of it or others."""
        if self.is_already_sharded:
            return False
        if self.num_processes > 1 or (self.mesh is not None and self.mesh.size() > 1):
            return True
        return bool(self.rng_types) and PartialState().num_processes > 1  # they read the whole, and in the same order

    @property
    def order_is_shared(self) -> bool:
        """Whether all processes iterate the same indices, so that each can take its shard of them."""
        if self.is_stream or self.is_already_sharded:
            return False
        has_others = self.mesh is not None and self.mesh.size() > 1
        return has_others or 1 < self.num_processes == PartialState().num_processes

    @property
    def local_batch_size(self) -> int | None:
        """Samples in a batch of this process; None when the loader's batch size is unknown."""
        size = self.dataloader.batch_size
        return size // self.num_processes if self.split_batches and size is not None else size


def shard_position(num_processes: int | None, process_index: int | None, mesh: Any) -> tuple[int, int]:
    """The number of shards of the dataset, and the index of this process's shard.

    Raises:
        ValueError: There is no such shard.
    """
    if mesh is not None and num_processes is None:
        shard = data_shard_of(mesh)
        return shard.count, shard.index
    state = PartialState()
    count = state.num_processes if num_processes is None else num_processes
    index = state.process_index if process_index is None else process_index
    if count != 1 and not 0 <= index < count:  # all read the same one
        raise ValueError(
            f"process_index={index!r} is no shard of num_processes={count!r}. Give an index from 0 to one less than the "
            "number of processes, or leave both out."
        )
    return count, index


def choose_sampler(dataloader: DataLoader[Any], use_seedable_sampler: bool, data_seed: int | None) -> Any:
    """The sampler of single indices, made seedable if asked for."""
    sampler = get_sampler(dataloader)
    if not isinstance(sampler, RandomSampler) or not use_seedable_sampler:
        return sampler
    return SeedableRandomSampler(
        data_source=sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator if sampler.generator is not None else torch.Generator(),
        data_seed=data_seed,
    )


def _check_indexed(plan: LoaderPlan) -> None:
    """Warn of an indexed dataset without samples; raise an error for one without batches, unless one process alone reads it."""
    dataset: Any = plan.dataloader.dataset
    reads_on_one = plan.num_processes == 1 or plan.is_dispatched or plan.is_already_sharded
    kind = type(dataset).__name__
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        warn_user(
            f"{kind} has length 0: a loop over its prepared loader is over at once. Check how the dataset was read."
        )
    if not reads_on_one and batch_sampler_of(plan.dataloader) is None:
        raise ValueError(
            f"batch_size=None yields the items of {kind} one by one, without batches to shard over "
            f"{plan.num_processes} processes. Give the data loader a batch_size, or read on one process for all with "
            "dispatch_batches=True."
        )


def _check_divisible(dataloader: DataLoader[Any], count: int) -> None:
    size = dataloader.batch_size
    if size is None:
        size = getattr(batch_sampler_of(dataloader), "batch_size", None)
    if size is None:
        raise ValueError(
            "split_batches=True needs to know the batch size, but neither the data loader nor its batch sampler has "
            "one. Give the sampler the attribute batch_size, or set split_batches=False."
        )
    if size % count != 0:
        raise ValueError(
            f"split_batches=True cannot split batches of {size} evenly over {count} processes. Choose a batch size "
            f"that is a multiple of {count}, or set split_batches=False."
        )
