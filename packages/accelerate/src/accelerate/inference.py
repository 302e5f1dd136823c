"""Pipeline-parallel inference: a model split into stages over the ranks of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from accel_bigmodel.device_map.plan import infer_auto_device_map
from accel_bigmodel.sizes import calculate_maximum_sizes as calculate_maximum_sizes
from accel_ops.batches import ignorant_find_batch_size
from accel_ops.batches import pad_input_tensors as pad_input_tensors
from accel_ops.placement import send_to_device as send_to_device
from accel_state.libraries import is_pippy_available as is_pippy_available
from accel_state.processes import PartialState
from accelerate.compat.legacy import legacy_getattr

__getattr__ = legacy_getattr(__name__)  # what programs import from here

if TYPE_CHECKING:
    from torch import nn

    from accel_integrations.parallel.pipeline.group import PipelineGroup


def prepare_pippy(
    model: nn.Module,
    split_points: Literal["auto"] | list[str] = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: tuple[Any, ...] | None = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> nn.Module:
    """Split a model into stages over the ranks of the run, for inference.

    A model with a chain of blocks is split between the blocks: batches may then have any size and shapes, outputs have the
    model's own type, and each rank keeps only its own stage in memory. Any other model is traced by
    `torch.distributed.pipelining`, which needs an example; inputs must then have the shapes of the example, and the
    outputs are plain tensors.

    Args:
        model (`torch.nn.Module`): The model, with equal weights on all ranks.
        split_points (`"auto"` or list of `str`): Names of the modules at which the second and every further rank's
            stage begins; `"auto"` keeps the largest stage as small as possible.
        no_split_module_classes (list of `str`, *optional*): Names of classes that are not split, where a model without a
            chain of blocks is split by `"auto"`.
        example_args (`tuple`): Positional arguments of the forward, for one batch. With them, the forward is tried once.
        example_kwargs (`dict`, *optional*): Keyword arguments, in the same way.
        num_chunks (`int`, *optional*): Into how many micro-batches a batch is split, so that stages overlap; by default the
            number of ranks. Batches are padded to a multiple of it.
        gather_output (`bool`): Whether every rank gets the output; otherwise only the last rank does, and others get None.

    Returns:
        The model, whose forward runs all stages. Call it on all ranks; the inputs are those of rank 0.

    Raises:
        ValueError: The model can neither be split nor traced, or an argument is not valid.

    Example:
        ```py
        model = prepare_pippy(model, example_args=(input_ids,), gather_output=True)
        with torch.no_grad():
            logits = model(input_ids).logits
        ```
    """
    state = PartialState()
    count = state.num_processes
    if num_chunks is not None and (not isinstance(num_chunks, int) or num_chunks < 1):
        raise ValueError(f"num_chunks={num_chunks!r} is not valid. Pass an int of at least 1, or None.")
    if isinstance(split_points, str) and split_points != "auto":
        raise ValueError(f"split_points={split_points!r} is not valid. Pass 'auto' or a list of module names.")
    if count == 1:
        model.hf_split_points = []  # type: ignore[assignment]
        return model.to(state.device)
    example = (tuple(example_args or ()), dict(example_kwargs or {})) if example_args or example_kwargs else None
    group = _pipeline_group(state)
    chunks = num_chunks or count
    forward, names = _split_or_trace(
        model, split_points, no_split_module_classes, group, chunks, bool(gather_output), example
    )
    model.forward = forward
    model.hf_split_points = names  # type: ignore[assignment]
    return model


def _pipeline_group(state: PartialState) -> PipelineGroup:
    import torch.distributed as dist

    from accel_integrations.parallel.pipeline.group import PipelineGroup

    world = dist.group.WORLD
    assert world is not None
    return PipelineGroup(world, state.num_processes, state.device)


def _split_or_trace(
    model: nn.Module,
    split_points: Any,
    no_split_module_classes: Any,
    group: PipelineGroup,
    chunks: int,
    gather_output: bool,
    example: Any,
) -> tuple[Callable[..., Any], list[str]]:
    """The replacement of the model's forward, and the split points."""
    from accel_integrations.parallel.pipeline.inference import StagedInference, TracedInference
    from accel_integrations.parallel.pipeline.split import split_model

    try:
        split = split_model(model, group.num_stages, split_points)
        return StagedInference(model, split, group, chunks, gather_output, example), split.split_points
    except (ValueError, RuntimeError) as error:
        reason = error
    if example is None:
        raise ValueError(
            f"{reason} To trace {type(model).__name__} instead, pass example_args or example_kwargs."
        ) from reason
    names = (
        _borders(generate_device_map(model, group.size, no_split_module_classes))
        if split_points == "auto"
        else split_points
    )
    try:
        return TracedInference(model, names, group, chunks, gather_output, example), list(names)
    except ValueError as error:
        raise ValueError(f"{error} It cannot be split between its modules either: {reason}") from error


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
) -> dict[str, Any]:
    """Assign the modules of a model to processes, about the same number of bytes to each.

    Args:
        model (`torch.nn.Module`): The model.
        num_processes (`int`): How many processes.
        no_split_module_classes (list of `str`, *optional*): Names of classes that are not split.
        max_memory (`dict`, *optional*): Bytes by process; by default the same for each, and the rest on the last one.

    Returns:
        For each module, by name and in order, the number of its process.
    """
    if max_memory is None and num_processes > 1:
        total, (largest, _) = calculate_maximum_sizes(model)
        per_process = total // num_processes + largest
        max_memory = {**dict.fromkeys(range(num_processes - 1), per_process), num_processes - 1: 2 * total}
    return dict(
        infer_auto_device_map(model, max_memory, no_split_module_classes, clean_result=False)
        if max_memory
        else infer_auto_device_map(model, None, no_split_module_classes, clean_result=False)
    )


def _borders(device_map: Mapping[str, Any]) -> list[str]:
    """The modules at which the stages of the second and every further process begin."""
    return [name for (_, before), (name, place) in pairwise(device_map.items()) if place != before]


def find_pippy_batch_size(args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> int | None:
    """The batch size of the first argument that has one; None when there is none.

    Args:
        args: Positional arguments of a forward.
        kwargs: Its keyword arguments.
    """
    for argument in (*(args or ()), *(kwargs or {}).values()):
        size = ignorant_find_batch_size(argument)
        if size is not None:
            return size
    return None


def build_pipeline(
    model: nn.Module,
    split_points: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    num_chunks: int,
) -> Any:
    """Trace a model and make the schedule of `torch.distributed.pipelining` for this rank's stage.

    Args:
        model: The model.
        split_points: Names of the modules at which the second and every further stage begins.
        args: Positional arguments of the forward, for one batch.
        kwargs: Its keyword arguments.
        num_chunks: Into how many micro-batches a batch is split; the schedule takes batches of the example's size.

    Raises:
        ValueError: The model cannot be traced.
    """
    from accel_integrations.parallel.pipeline.inference import trace_stage, with_padding
    from accel_integrations.parallel.pipeline.microbatches import split_batch
    from accel_integrations.parallel.pipeline.older_torch import gpipe

    size = find_pippy_batch_size(args, kwargs) or 1
    args, kwargs = with_padding((tuple(args), dict(kwargs or {})), size, num_chunks)
    chunk = split_batch(args, dict(kwargs or {}), num_chunks).inputs[0]
    return gpipe(trace_stage(model, split_points, chunk, _pipeline_group(PartialState())), num_chunks)


def pippy_forward(forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any) -> Any:
    """Run a batch through a schedule that `build_pipeline` made.

    Args:
        forward: The schedule's `step`.
        num_chunks: Its number of chunks.
        gather_output: Whether every rank gets the output; otherwise only the last rank does, and others get None.
        args: Positional arguments of the model's forward; ignored on all ranks but rank 0.
        kwargs: Its keyword arguments, in the same way.
    """
    from accel_integrations.parallel.pipeline.inference import gathered, with_padding, without_padding

    group = _pipeline_group(PartialState())
    sizes = None
    if group.rank == 0:
        size = find_pippy_batch_size(args, kwargs)
        assert size is not None
        args, kwargs = with_padding(send_to_device((args, kwargs), group.device), size, num_chunks)
        sizes = (size, find_pippy_batch_size(args, kwargs))
    size, padded = group.broadcast_object(sizes, 0)
    output = forward(*args, **kwargs) if group.rank == 0 else forward()
    if group.rank == group.last_rank:
        output = without_padding(output, size, padded)
    return gathered(output, group) if gather_output else output
