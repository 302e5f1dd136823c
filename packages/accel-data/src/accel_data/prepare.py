"""Preparing a `DataLoader` to read this process's shard: a plan, then the sampler, the shard and the loader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accel_data.adapter import copied_arguments
from accel_data.dispatcher import DataLoaderDispatcher
from accel_data.loader_shard import DataLoaderShard
from accel_data.order_check import OrderCheck
from accel_data.prepared_loader import PreparedLoader
from accel_data.program_loaders import is_already_sharded, is_derived, reads_otherwise
from accel_data.samplers import (
    BatchSamplerShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    batch_sampler_of,
    get_sampler,
)
from accel_data.streams import CountingCollate, IterableDatasetShard, SplitStream, find_split
from accel_state.enums import RNGType
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


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    already_sharded: bool = False,
) -> DataLoader[Any]:
    """Make a data loader yield this process's shard of the dataset, in batches.

    Args:
        dataloader (`torch.utils.data.DataLoader`): The loader, as for one process.
        device (`torch.device`, *optional*): Device of batches; that of the process when None.
        num_processes (`int`, *optional*): The number of shards of the dataset; as many as there
            are when None.
        process_index (`int`, *optional*): The index of the shard; that of this process when None.
        split_batches (`bool`): Whether a batch of `dataloader` is the global batch, of all processes together.
        put_on_device (`bool`): Move batches to the device.
        rng_types (list of `str` or `RNGType`, *optional*): Random generators to synchronize when an iteration begins.
        dispatch_batches (`bool`, *optional*): Read on the main process only and send the others their batches; when
            None, for streams that are put on the device and cannot be sharded at their source.
        even_batches (`bool`): Yield the same number of batches on all processes, padded with repeated samples if necessary.
        slice_fn_for_dispatch (*optional*): Slices a global batch into those of the processes.
        use_seedable_sampler (`bool`): Shuffle by seed and epoch alone.
        data_seed (`int`, *optional*): The seed of the seedable sampler.
        non_blocking (`bool`): Whether the host goes on before a batch is copied to the device also where it is not in pinned memory.
        use_stateful_dataloader (`bool`): Continue by itself an epoch that a checkpoint was saved in.
        torch_device_mesh (*optional*): Ranks that differ only along its tensor, context or sequence dimension read the
            same.
        already_sharded (`bool`): Each process's loader yields a shard of its own, which is read as it is. Samplers and streams that
            say so themselves, such as a `DistributedSampler`, are recognized.

    Returns:
        A `DataLoaderShard` or `DataLoaderDispatcher`. A loader of a class that a program derived reads through a copy of itself, and keeps its methods.

    Raises:
        ValueError: For arguments that cannot be combined, an empty dataset, or a batch that cannot be sharded evenly.
    """
    count, index = shard_position(num_processes, process_index, torch_device_mesh)
    is_stream = isinstance(dataloader.dataset, IterableDataset)
    if not already_sharded and (count > 1 or torch_device_mesh is not None):
        samplers = () if is_stream else (get_sampler(dataloader), batch_sampler_of(dataloader))
        already_sharded = is_already_sharded(dataloader.dataset, samplers, index, count)
    split = None
    if is_stream and count > 1 and not dispatch_batches:
        split = dataloader.dataset if already_sharded else find_split(dataloader.dataset, index, count)
    if dispatch_batches is None:
        dispatch_batches = put_on_device and is_stream and not already_sharded and split is None
    plan = LoaderPlan(
        dataloader=dataloader,
        device=(device or PartialState().device) if put_on_device else None,
        num_processes=count,
        process_index=index,
        split_batches=split_batches,
        rng_types=rng_types,
        is_dispatched=dispatch_batches,
        even_batches=even_batches,
        slice_fn=slice_fn_for_dispatch,
        sampler=choose_sampler(dataloader, use_seedable_sampler, data_seed),
        is_seedable=use_seedable_sampler,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
        mesh=torch_device_mesh,
        split=split,
        is_already_sharded=already_sharded,
    )
    prepared: PreparedLoader = _dispatcher(plan) if plan.is_dispatched else _shard(plan)
    if plan.is_seedable and isinstance(plan.sampler, SeedableRandomSampler):
        prepared.set_sampler(plan.sampler)
    if is_derived(dataloader):
        prepared.read_with(dataloader)
    return prepared


def _dispatcher(plan: LoaderPlan) -> DataLoaderDispatcher:
    arguments = _loader_arguments(plan) | _unsharded_order(plan.dataloader) | {"generator": None}
    first_batches = None
    if plan.use_stateful_dataloader and arguments.get("batch_sampler") is not None:
        # torchdata passes over the first batches when it resumes an epoch, so the sampler remembers them
        arguments["batch_sampler"] = first_batches = SkipBatchSampler(arguments["batch_sampler"])
        first_batches.keep_first(1 if plan.split_batches else plan.num_processes)
    prepared = DataLoaderDispatcher(
        plan.dataloader.dataset, split_batches=plan.split_batches, slice_fn=plan.slice_fn, **arguments
    )
    prepared.keeps_first = first_batches
    return prepared


def _shard(plan: LoaderPlan) -> DataLoaderShard:
    generator = _shared_generator(plan) if plan.is_sharded else None
    dataset, order = _sharded_stream(plan) if plan.is_stream else (plan.dataloader.dataset, _sharded_order(plan))
    prepared = DataLoaderShard(
        dataset,
        device=plan.device,
        rng_types=_without_missing_generator(plan.rng_types, generator),
        synchronized_generator=generator,
        **(_loader_arguments(plan) | order),
    )
    if plan.is_already_sharded and not plan.is_stream:
        prepared.num_own_shards = plan.num_processes
    if plan.order_is_shared:
        prepared.check_order(OrderCheck(plan.dataloader.dataset))
    draws_from_torch = hasattr(plan.sampler, "generator") and plan.sampler.generator is None
    prepared.draws_together = plan.is_sharded and plan.is_seedable and not plan.is_stream and draws_from_torch
    return prepared


def _loader_arguments(plan: LoaderPlan) -> dict[str, Any]:
    """The arguments of both kinds of prepared loaders, except for the order of the samples."""
    return copied_arguments(plan.dataloader) | {
        "_drop_last": plan.dataloader.drop_last,
        "_non_blocking": plan.non_blocking,
        "use_stateful_dataloader": plan.use_stateful_dataloader,
        "torch_device_mesh": plan.mesh,
    }


def _unsharded_order(dataloader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments of a loader that reads the same samples as the given one."""
    if isinstance(dataloader.dataset, IterableDataset):
        return {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    if dataloader.batch_sampler is None and not isinstance(dataloader.sampler, BatchSampler):
        return {"batch_size": None, "sampler": dataloader.sampler}
    return {"batch_sampler": batch_sampler_of(dataloader)}


def _sharded_stream(plan: LoaderPlan) -> tuple[Any, dict[str, Any]]:
    """This process's shard of a stream, sharded at its source where it can be, and how it is batched."""
    dataset: Any = plan.dataloader.dataset
    order: dict[str, Any] = {"batch_size": plan.local_batch_size, "drop_last": plan.dataloader.drop_last}
    if plan.split is not None:
        dataset = SplitStream(plan.split, plan.local_batch_size or 1, plan.num_processes)
    elif plan.num_processes > 1:
        dataset = IterableDatasetShard(
            dataset,
            batch_size=plan.dataloader.batch_size or 1,
            drop_last=plan.dataloader.drop_last,
            num_processes=plan.num_processes,
            process_index=plan.process_index,
            split_batches=plan.split_batches,
        )
        dataset.marks_padding = not (is_derived(plan.dataloader) and reads_otherwise(plan.dataloader))
        if dataset.marks_padding:
            order["collate_fn"] = CountingCollate(plan.dataloader.collate_fn)
    return dataset, order


def _sharded_order(plan: LoaderPlan) -> dict[str, Any]:
    """The arguments of a loader that reads this process's batches of an indexed dataset."""
    dataloader = plan.dataloader
    reads_all = plan.num_processes == 1 or plan.is_already_sharded
    if reads_all and not isinstance(dataloader.sampler, BatchSampler):
        return _unsharded_order(dataloader)
    batches = batch_sampler_of(dataloader)
    if not reads_all:
        batches = BatchSamplerShard(
            batches,
            num_processes=plan.num_processes,
            process_index=plan.process_index,
            split_batches=plan.split_batches,
            even_batches=plan.even_batches,
        )
    if isinstance(dataloader.sampler, BatchSampler):
        return {"batch_size": dataloader.batch_size, "sampler": batches}
    return {"batch_sampler": batches}


def _without_missing_generator(rng_types: list[Any] | None, generator: Any) -> list[Any] | None:
    """The kinds of random generators to synchronize; without "generator" if the sampler has none."""
    if rng_types is None or generator is not None:
        return rng_types
    return [kind for kind in rng_types if kind not in (RNGType.GENERATOR, RNGType.GENERATOR.value)]


def _shared_generator(plan: LoaderPlan) -> Any:
    """The generator from which all processes must draw the same numbers; created if the sampler has none."""
    sampler = plan.sampler
    if plan.is_stream:
        return getattr(plan.dataloader.dataset, "generator", None)
    if isinstance(sampler, SeedableRandomSampler) or not hasattr(sampler, "generator"):
        return None
    if sampler.generator is None and not plan.is_seedable:
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    return sampler.generator
