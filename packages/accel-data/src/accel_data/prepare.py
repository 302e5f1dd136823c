"""From a `DataLoader` to one that reads its process's share: choose the sampler, the shard, the loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accel_data.adapter import copied_arguments
from accel_data.batch_shard import BatchSamplerShard
from accel_data.dispatcher import DataLoaderDispatcher
from accel_data.iterable_shard import IterableDatasetShard
from accel_data.loader_shard import DataLoaderShard
from accel_data.samplers import SeedableRandomSampler, batch_sampler_of, get_sampler
from accel_data.skipping import SkipBatchSampler
from accel_data.split_stream import SplitStream, find_split
from accel_state.enums import RNGType
from accel_state.mesh import data_place_of
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
) -> DataLoader[Any]:
    """Make a data loader yield this process's share of the batches.

    Args:
        dataloader (`torch.utils.data.DataLoader`): The loader, as for one process.
        device (`torch.device`, *optional*): Where batches go; that of the process when None.
        num_processes (`int`, *optional*): Over how many processes; as many as there are when None.
        process_index (`int`, *optional*): Which of them; this one when None.
        split_batches (`bool`): Whether a batch is that of all processes together.
        put_on_device (`bool`): Move batches to the device.
        rng_types (list of `str` or `RNGType`, *optional*): Random generators to synchronise at every beginning.
        dispatch_batches (`bool`, *optional*): Read on the first process only; when None, for streams that are put on
            the device and cannot be divided at their source.
        even_batches (`bool`): Give all processes equally many batches, with some samples twice if need be.
        slice_fn_for_dispatch (*optional*): Cuts a batch that was read for all processes.
        use_seedable_sampler (`bool`): Shuffle by seed and epoch alone.
        data_seed (`int`, *optional*): That seed.
        non_blocking (`bool`): Let copies to the device overlap with other work.
        use_stateful_dataloader (`bool`): Read through torchdata's `StatefulDataLoader`.
        torch_device_mesh (*optional*): Processes that differ only along its tensor, context or sequence axes read the
            same.

    Returns:
        A `DataLoaderShard` or `DataLoaderDispatcher`.

    Raises:
        ValueError: For settings that cannot be combined, or a batch that cannot be cut evenly.
    """
    count, index = _place(num_processes, process_index, torch_device_mesh)
    is_stream = isinstance(dataloader.dataset, IterableDataset)
    part = find_split(dataloader.dataset, index, count) if is_stream and count > 1 and not dispatch_batches else None
    if dispatch_batches is None:
        dispatch_batches = put_on_device and is_stream and part is None
    if dispatch_batches and not put_on_device:
        raise ValueError(
            "dispatch_batches=True sends batches to the devices, so it cannot be combined with put_on_device=False: "
            "leave device_placement on, or set dispatch_batches=False."
        )
    if not is_stream:
        _check_indexed(dataloader, alone=count == 1 or bool(dispatch_batches), count=count)
    if split_batches:
        _check_divisible(dataloader, count)

    sampler = _choose_sampler(dataloader, use_seedable_sampler, data_seed)
    arguments = copied_arguments(dataloader) | {
        "_drop_last": dataloader.drop_last,
        "_non_blocking": non_blocking,
        "use_stateful_dataloader": use_stateful_dataloader,
        "torch_device_mesh": torch_device_mesh,
    }
    prepared: Any
    if dispatch_batches:
        arguments |= _order_for_all(dataloader) | {"generator": None}
        keeps_first = (
            _keep_first_batches(arguments, 1 if split_batches else count) if use_stateful_dataloader else None
        )
        prepared = DataLoaderDispatcher(
            dataloader.dataset, split_batches=split_batches, slice_fn=slice_fn_for_dispatch, **arguments
        )
        prepared.keeps_first = keeps_first
    else:
        is_shared = count > 1 or (torch_device_mesh is not None and torch_device_mesh.size() > 1)
        generator = (
            _shared_generator(dataloader.dataset, sampler, make=not use_seedable_sampler) if is_shared else None
        )
        if is_stream:
            dataset, order = _shard_of_stream(dataloader, part, count, index, split_batches)
        else:
            dataset = dataloader.dataset
            order = _shard_of_batches(dataloader, count, index, split_batches, even_batches)
        prepared = DataLoaderShard(
            dataset,
            device=(device or PartialState().device) if put_on_device else None,
            rng_types=_with_generators(rng_types, generator),
            synchronized_generator=generator,
            **arguments,
            **order,
        )
        prepared.draws_together = is_shared and use_seedable_sampler and not is_stream and _draws(sampler)
    if isinstance(sampler, SeedableRandomSampler) and use_seedable_sampler:
        prepared.set_sampler(sampler)
    return prepared


def _place(num_processes: int | None, process_index: int | None, mesh: Any) -> tuple[int, int]:
    """Between how many the data are shared out, and which of them this process is."""
    if mesh is not None and num_processes is None:
        place = data_place_of(mesh)
        return place.count, place.index
    state = PartialState()
    return (
        state.num_processes if num_processes is None else num_processes,
        state.process_index if process_index is None else process_index,
    )


def _order_for_all(dataloader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments of a loader that reads what the given one would."""
    if isinstance(dataloader.dataset, IterableDataset):
        return {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    if dataloader.batch_sampler is None and not isinstance(dataloader.sampler, BatchSampler):
        return {"batch_size": None, "sampler": dataloader.sampler}
    return {"batch_sampler": batch_sampler_of(dataloader)}


def _keep_first_batches(arguments: dict[str, Any], num_batches: int) -> Any:
    """Have the sampler of batches remember the first ones: torchdata passes over them when it resumes an epoch."""
    if arguments.get("batch_sampler") is None:
        return None
    arguments["batch_sampler"] = keeps_first = SkipBatchSampler(arguments["batch_sampler"])
    keeps_first.keep_first(num_batches)
    return keeps_first


def _shard_of_stream(
    dataloader: DataLoader[Any], part: Any, count: int, index: int, split_batches: bool
) -> tuple[Any, dict[str, Any]]:
    """This process's share of a stream - its own part, where it can be divided - and how it is batched."""
    size = _own_batch_size(dataloader, split_batches, count)
    dataset: Any = dataloader.dataset
    if part is not None:
        dataset = SplitStream(part, size or 1, count)
    elif count > 1:
        dataset = IterableDatasetShard(
            dataset,
            batch_size=dataloader.batch_size or 1,
            drop_last=dataloader.drop_last,
            num_processes=count,
            process_index=index,
            split_batches=split_batches,
        )
    return dataset, {"batch_size": size, "drop_last": dataloader.drop_last}


def _shard_of_batches(
    dataloader: DataLoader[Any], count: int, index: int, split_batches: bool, even_batches: bool
) -> dict[str, Any]:
    """The arguments of a loader that reads this process's batches of an indexed data set."""
    if count == 1 and not isinstance(dataloader.sampler, BatchSampler):
        return _order_for_all(dataloader)
    batches = batch_sampler_of(dataloader)
    if count > 1:
        batches = BatchSamplerShard(
            batches, num_processes=count, process_index=index, split_batches=split_batches, even_batches=even_batches
        )
    if isinstance(dataloader.sampler, BatchSampler):
        return {"batch_size": dataloader.batch_size, "sampler": batches}
    return {"batch_sampler": batches}


def _with_generators(rng_types: list[Any] | None, generator: Any) -> list[Any] | None:
    """The kinds of random generators to synchronise; the sampler's only if there is one to share."""
    if rng_types is None or generator is not None:
        return rng_types
    return [kind for kind in rng_types if kind not in (RNGType.GENERATOR, RNGType.GENERATOR.value)]


def _choose_sampler(dataloader: DataLoader[Any], use_seedable_sampler: bool, data_seed: int | None) -> Any:
    """The sampler of single indices, made seedable if that is wanted."""
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


def _shared_generator(dataset: Any, sampler: Any, make: bool) -> Any:
    """The generator that all processes must draw the same numbers from; made, if wanted, where the sampler has none."""
    if isinstance(dataset, IterableDataset):
        return getattr(dataset, "generator", None)
    if isinstance(sampler, SeedableRandomSampler) or not hasattr(sampler, "generator"):
        return None
    if sampler.generator is None and make:
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    return sampler.generator


def _draws(sampler: Any) -> bool:
    """Whether a sampler draws from torch's own generator, because it may have one and has not."""
    return hasattr(sampler, "generator") and sampler.generator is None


def _check_indexed(dataloader: DataLoader[Any], alone: bool, count: int) -> None:
    """Refuse an indexed data set without samples, or, unless it is read by one process alone, without batches."""
    dataset: Any = dataloader.dataset
    kind = type(dataset).__name__
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise ValueError(
            f"{kind} has length 0, so there is nothing to share out: check how it was read, or do not prepare a data "
            "loader for it."
        )
    if not alone and batch_sampler_of(dataloader) is None:
        raise ValueError(
            f"batch_size=None hands out the items of {kind} one by one, without batches to share out between {count} "
            "processes: give the data loader a batch_size, or read on one process for all with dispatch_batches=True."
        )


def _check_divisible(dataloader: DataLoader[Any], count: int) -> None:
    size = dataloader.batch_size
    if size is None:
        size = getattr(batch_sampler_of(dataloader), "batch_size", None)
    if size is None:
        raise ValueError(
            "split_batches=True needs to know the batch size, but neither the data loader nor its batch sampler has "
            "one: give the sampler the attribute batch_size, or set split_batches=False."
        )
    if size % count != 0:
        raise ValueError(
            f"split_batches=True cannot cut batches of {size} evenly between {count} processes: choose a batch size "
            f"that is a multiple of {count}, or set split_batches=False."
        )


def _own_batch_size(dataloader: DataLoader[Any], split_batches: bool, count: int) -> int | None:
    size = dataloader.batch_size
    return size // count if split_batches and size is not None else size
