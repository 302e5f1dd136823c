"""Inference in stages: a model too large for one device, split between its modules, or traced where that fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from accel_integrations.parallel.pipeline.group import PipelineGroup
from accel_integrations.parallel.pipeline.microbatches import find_size, split_batch
from accel_integrations.parallel.pipeline.model import Pipeline
from accel_integrations.parallel.pipeline.older_torch import gpipe, match_dtypes
from accel_integrations.parallel.pipeline.shapes import Structure, tensors_in
from accel_integrations.parallel.pipeline.split import ModelSplit
from accel_integrations.parallel.pipeline.stage import StagedModel
from accel_ops.placement import send_to_device
from accel_state.settings.parallelism import PipelineParallelConfig

Example = tuple[tuple[Any, ...], dict[str, Any]]


class StagedInference:
    """Stands in for the forward of a model that was split between its modules.

    Inputs are those of rank 0, whatever the other ranks pass. Batches may have any size and shapes.

    Args:
        model: The model; modules of other stages are replaced in it once the example has shown that this works.
        split: Where it is split.
        group: The pipeline group.
        num_chunks: Number of micro-batches per batch.
        gather_output: Whether all ranks get the output, not only the last one.
        example: Arguments to try the split with; None skips that.

    Raises:
        ValueError: When the model cannot be split like this; it is restored then.
        RuntimeError: The same error, on ranks other than the one that failed.
    """

    def __init__(
        self,
        model: nn.Module,
        split: ModelSplit,
        group: PipelineGroup,
        num_chunks: int,
        gather_output: bool,
        example: Example | None,
    ) -> None:
        self.group = group
        self.num_chunks = num_chunks
        self.gather_output = gather_output
        staged = StagedModel(model, split, group.held, group.device, forward=model.forward)
        settings = PipelineParallelConfig("gpipe", num_chunks, split.split_points or "auto")
        settings.broadcast_outputs = gather_output
        self._pipeline = Pipeline(staged, group, settings)
        if example is not None:
            try:
                self._chunked(*example)
            except BaseException:
                staged.undo()
                raise
        staged.release()
        model.to(group.device)

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a batch; None on ranks that do not get it."""
        args, kwargs = self._inputs_of_rank_zero(args, kwargs)
        size = find_size(args, kwargs)
        padded, structures = self._chunked(args, kwargs)
        has_numbers = any(not shape.shape for shape in structures[""][0].tensors)  # as a loss, which padding changes
        output = self._pipeline(*((args, kwargs) if has_numbers else padded))
        if not self.gather_output and self.group.rank != self.group.last_rank:
            return None
        return output if has_numbers else without_padding(output, size, find_size(*padded))

    @torch.no_grad()
    def _chunked(self, args: Any, kwargs: Any) -> tuple[Example, dict[str, list[Structure]]]:
        """The inputs padded to a multiple of `num_chunks`, and what modules return for a micro-batch of them."""
        args, kwargs = send_to_device((tuple(args), kwargs), self.group.device)
        args, kwargs = with_padding((args, kwargs), find_size(args, kwargs), self.num_chunks)
        return (args, kwargs), self._pipeline.measure(split_batch(args, kwargs, self.num_chunks))

    def _inputs_of_rank_zero(self, args: Any, kwargs: Any) -> Example:
        group = self.group
        inputs = send_to_device((args, kwargs), group.device)
        structure: Structure = group.broadcast_object(Structure.of(inputs) if group.rank == 0 else None, 0)
        tensors = tensors_in(inputs) if group.rank == 0 else [one.empty(group.device) for one in structure.tensors]
        tensors = [tensor.contiguous() for tensor in tensors]
        for tensor in tensors:
            group.broadcast(tensor, 0)
        example: Example = inputs if group.rank == 0 else structure.filled(tensors)
        return example


class TracedInference:
    """Stands in for the forward of a model that `torch.distributed.pipelining` traced and split.

    Args:
        model: The model.
        split_points: Names of the modules at which the second and every further stage begin.
        group: The pipeline group.
        num_chunks: Number of micro-batches for a batch of the example's size.
        gather_output: Whether all ranks get the output, not only the last one.
        example: Arguments; later ones must have the same shapes, except for the batch size.

    Raises:
        ValueError: When the model cannot be traced, with the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        split_points: Sequence[str],
        group: PipelineGroup,
        num_chunks: int,
        gather_output: bool,
        example: Example,
    ) -> None:
        self.group = group
        self.gather_output = gather_output
        size = math.ceil(find_size(*example) / num_chunks)
        args, kwargs = with_padding(example, find_size(*example), num_chunks)
        chunk = split_batch(args, kwargs, num_chunks).inputs[0]
        self.chunk_size = size
        self._shapes = [tuple(tensor.shape[1:]) for tensor in tensors_in(chunk)]
        self._stage = trace_stage(model, split_points, chunk, group)
        self._schedules: dict[int, Any] = {}

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a batch; None on ranks that do not get it."""
        group = self.group
        sizes = None
        if group.rank == 0:
            size = find_size(args, kwargs)
            args, kwargs = with_padding(send_to_device((args, kwargs), group.device), size, self.chunk_size)
            sizes = (size, find_size(args, kwargs), [tuple(tensor.shape[1:]) for tensor in tensors_in((args, kwargs))])
        size, padded_size, shapes = group.broadcast_object(sizes, 0)
        if shapes != self._shapes:
            raise ValueError(
                f"The model was traced for inputs of shapes {self._shapes} after the batch dimension, but got "
                f"{shapes}. Pad the inputs, or prepare the model with an example of their shapes."
            )
        count = padded_size // self.chunk_size
        schedule = self._schedules.get(count)
        if schedule is None:
            schedule = self._schedules[count] = gpipe(self._stage, count)
        output = schedule.step(*args, **kwargs) if group.rank == 0 else schedule.step()
        if group.rank == group.last_rank:
            output = without_padding(output, size, padded_size)
        return gathered(output, group) if self.gather_output else output


def trace_stage(model: nn.Module, split_points: Sequence[str], chunk: Example, group: PipelineGroup) -> Any:
    """This rank's stage of a traced model.

    Args:
        model: The model.
        split_points: Names of the modules at which the second and every further stage begin.
        chunk: Arguments of the model for one micro-batch.
        group: The pipeline group.

    Raises:
        ValueError: When the model cannot be traced, with the reason.
    """
    import torch.distributed.pipelining as pipelining

    spec = dict.fromkeys(split_points, pipelining.SplitPoint.BEGINNING)
    try:
        pipe = pipelining.pipeline(model, chunk[0], chunk[1], split_spec=spec)
        stage = match_dtypes(pipe.build_stage(group.rank, group.device, group.process_group))
    except Exception as error:
        reason = next((row.strip() for row in str(error).splitlines() if row.strip()), type(error).__name__)
        raise ValueError(
            f"{type(model).__name__} cannot be traced: {type(error).__name__}: {reason} See "
            "https://pytorch.org/docs/stable/export.html for what stops torch.export."
        ) from error
    if pipe.num_stages != group.num_stages:
        raise ValueError(
            f"split_points={list(split_points)!r} split {type(model).__name__} into {pipe.num_stages} stages, but "
            f"there are {group.num_stages} processes. Name {group.num_stages - 1} modules that its forward calls."
        )
    _check_inputs_stay(pipe, model)
    return stage


def _check_inputs_stay(pipe: Any, model: nn.Module) -> None:
    """Check that no later stage uses the model's inputs, which only the first stage gets."""
    nodes = [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"]
    for number, node in enumerate(nodes[1:], start=1):
        inputs = [argument.name for argument in node.all_input_nodes if argument.op == "placeholder"]
        if inputs:
            raise ValueError(
                f"{type(model).__name__} cannot be traced into stages: stage {number} uses the model's inputs "
                f"{', '.join(map(repr, inputs))}, which only the first stage gets. Split where blocks take nothing but "
                "the output of the block before."
            )


def gathered(output: Any, group: PipelineGroup) -> Any:
    """Broadcast the output of the last stage to all ranks."""
    structure: Structure = group.broadcast_object(
        Structure.of(output) if group.rank == group.last_rank else None, group.last_rank
    )
    if group.rank == group.last_rank:
        tensors = [tensor.contiguous() for tensor in tensors_in(output)]
    else:
        tensors = [shape.empty(group.device) for shape in structure.tensors]
    for tensor in tensors:
        group.broadcast(tensor, group.last_rank)
    return structure.filled(tensors)


def with_padding(inputs: Any, size: int, multiple: int) -> Any:
    """Repeat the last sample until the batch size is a multiple of a number."""
    missing = -size % multiple
    return _for_batches(
        inputs, size, lambda tensor: torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])
    ) if missing else inputs  # fmt: skip


def without_padding(output: Any, size: int, padded_size: int) -> Any:
    """Remove the samples that `with_padding` added."""
    return _for_batches(output, padded_size, lambda tensor: tensor[:size])


def _for_batches(data: Any, size: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def changed(leaf: Any) -> Any:
        is_batch = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == size
        return change(leaf) if is_batch else leaf

    return tree_map(changed, data)
