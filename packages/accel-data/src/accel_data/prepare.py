"""Preparing a `DataLoader` to read this process's shard: a plan, then the sampler, the shard and the loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_data.adapter import copied_arguments
from accel_data.already_sharded import is_already_sharded
from accel_data.batch_shard import BatchSamplerShard
from accel_data.derived_loaders import is_derived, reads_otherwise
from accel_data.dispatcher import DataLoaderDispatcher
from accel_data.iterable_shard import CountingCollate, IterableDatasetShard
from accel_data.loader_shard import DataLoaderShard
from accel_data.order_check import OrderCheck
from accel_data.plan import LoaderPlan, choose_sampler, shard_position
from accel_data.prepared_loader import PreparedLoader
from accel_data.samplers import SeedableRandomSampler, SkipBatchSampler, batch_sampler_of, get_sampler
from accel_data.split_stream import SplitStream, find_split
from accel_state.enums import RNGType
from accel_state.processes import PartialState


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
