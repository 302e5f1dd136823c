"""Gathering predictions for metrics: every sample of the dataset once, whatever the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_ops.batches import ignorant_find_batch_size
from accel_ops.collectives.gathering import gather_leaves
from accel_ops.collectives.objects import gather_object
from accel_ops.collectives.tensors import gather
from accel_ops.collectives.transport import host_group
from accel_ops.nested import recursively_apply
from accel_ops.samples import first_samples, join_samples, num_samples
from accel_state.logging import get_logger
from accel_state.processes import PartialState
from accel_state.supervision import report_progress
from accel_state.warning import warn_user
from accelerate.first_step_checks import tensors_in

if TYPE_CHECKING:
    from accel_state.gradient_state import GradientState
    from accel_state.mesh import ParallelismConfig

logger = get_logger(__name__)
NUM_LOOKED_AT = 4
"""So many results that come from outside of a prepared loader are looked at."""
_num_looked_at = 0


def gather_for_metrics(
    input_data: Any,
    use_gather_object: bool,
    state: GradientState,
    config: ParallelismConfig | None = None,
    readers: Any = None,
    gather: Callable[[Any], Any] = gather,
) -> Any:
    """Gather a batch's results and drop those of samples that only padded the last batch.

    Ranks of one model parallel group have the same batch and the same results, of which one is used.

    Args:
        input_data: Nested tensors of which the first dimension is the batch, or any picklable objects.
        use_gather_object: Gather as objects even if all leaves are tensors, for instance ones of different sizes; there are lists of
            their rows then.
        state: Has the data loader that is being iterated, or was left at its last batch.
        config: Says which ranks have the same batch; None if all have different ones.
        readers: The process group of ranks with different batches, where the engine has one of its own.
        gather: Gathers tensors over all ranks.

    Returns:
        The same nested structure, with the samples of all processes in each leaf: tensors concatenated, lists joined. See
        `accel_ops.samples` for what is a leaf where not all are tensors.
    """
    real = getattr(state.active_dataloader, "num_real_samples", None)
    if real is not None:  # this rank's shard of a stream has ended before others', and repeats samples as padding
        input_data = _first(input_data, real)
    as_objects = use_gather_object or not _holds_only_tensors(input_data)
    gathered = (
        _gather_batches(input_data, as_objects, use_gather_object, config, gather)
        if readers is None
        else _gather_over(input_data, as_objects, use_gather_object, readers)
    )
    if not state.in_dataloader:
        _warn_of_unprepared_batches(gathered)
    left = None if state.in_dataloader else state.left_dataloader
    if left is not None:
        remainder = left.remainder if _is_last_round(gathered, as_objects, left) else 0
    elif state.end_of_dataloader:
        remainder = state.remainder
    else:
        return gathered
    if remainder < 0:
        logger.info(
            "gather_for_metrics() cannot drop the padding of the last batch, because the length of the dataset is unknown."
        )
    if remainder <= 0:
        return gathered
    return first_samples(gathered, remainder, num_samples(gathered)) if as_objects else _first(gathered, remainder)


def _warn_of_unprepared_batches(gathered: Any) -> None:
    """Warn once if ranks bring the same results outside of a prepared loader: each has read all of the dataset."""
    global _num_looked_at
    if _num_looked_at == NUM_LOOKED_AT or PartialState().num_processes == 1:
        return
    _num_looked_at += 1
    count = PartialState().num_processes
    by_rank = [leaf.unflatten(0, (count, -1)) for leaf in tensors_in(gathered) if leaf.ndim and len(leaf) % count == 0]
    are_same = all(bool((rows == rows[0]).all()) for rows in by_rank)
    if are_same and any(bool((rows[0] != rows[0, :1]).any()) for rows in by_rank):  # not one answer for all samples
        _num_looked_at = NUM_LOOKED_AT
        warn_user(
            f"gather_for_metrics() got the same {by_rank[0].shape[1]} results from each of {count} processes, outside of a loop over a prepared "
            f"data loader: each process reads all samples, and metrics count them {count} times. Loop over the loader that "
            "accelerator.prepare(loader) returns."
        )


def _is_last_round(gathered: Any, as_objects: bool, loader: Any) -> bool:
    """Whether as many samples were gathered as the last batches of a loader hold that is not iterated any more.

    Other data may be gathered then, too, of which nothing may be dropped.
    """
    if loader.remainder <= 0:
        return False
    size = num_samples(gathered) if as_objects else ignorant_find_batch_size(gathered)
    count = PartialState().num_processes
    return size in (loader.total_batch_size, -(-loader.remainder // count) * count)


def _gather_objects(data: Any, by_rows: bool) -> Any:
    """Join what all ranks have; on one process, it is returned as it is."""
    if PartialState().num_processes == 1 or not hasattr(data, "__iter__"):
        return gather_object(data)  # which has an error for what cannot be joined
    return join_samples(gather_object([data]), by_rows=by_rows)


def _gather_batches(
    data: Any, as_objects: bool, by_rows: bool, config: ParallelismConfig | None, gather: Callable[[Any], Any]
) -> Any:
    """Gather over the ranks that read different shards of the dataset."""
    if config is None or config.non_data_parallel_size == 1 or config.device_mesh is None:
        return _gather_objects(data, by_rows) if as_objects else gather(data)
    mesh = config.axis_mesh("dp")
    if mesh is None:  # all ranks have the same batch
        return data if as_objects else recursively_apply(torch.atleast_1d, data)
    return _gather_over(data, as_objects, by_rows, mesh.get_group())


def _gather_over(data: Any, as_objects: bool, by_rows: bool, group: Any) -> Any:
    if not as_objects:
        return gather_leaves(data, "gather_for_metrics", PartialState(), group)
    batches: list[Any] = [None] * dist.get_world_size(group)
    report_progress()
    dist.all_gather_object(batches, data, group=host_group(group) or group)
    return join_samples(batches, by_rows=by_rows)


def _first(data: Any, count: int) -> Any:
    """The first samples of every leaf."""
    if not _holds_only_tensors(data):
        return first_samples(data, count, num_samples(data))
    return recursively_apply(lambda tensor: tensor[:count] if tensor.ndim else tensor, data)


def _holds_only_tensors(data: Any) -> bool:
    if isinstance(data, torch.Tensor):
        return True
    if isinstance(data, Mapping):
        return all(map(_holds_only_tensors, data.values()))
    return isinstance(data, (list, tuple)) and all(map(_holds_only_tensors, data))
