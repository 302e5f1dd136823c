"""Batches of a Hugging Face model, checked, padded and cut into micro-batches.

Legend: B = samples of a micro-batch, S = sequence length in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from accel_integrations.megatron.data.sequences import SequenceShares
from accel_integrations.megatron.data.tasks import IGNORED, MicroBatch, Task

WITHOUT_EFFECT = frozenset({"use_cache", "return_dict", "output_attentions", "output_hidden_states", "dataset_id"})

OF_DATASETS = frozenset({"tokens", "labels", "loss_mask", "position_ids", "attention_mask"})


@dataclass
class Limits:
    """What a model can take.

    Args:
        task: What it reads.
        max_length: Longest sequence in tokens.
        window: How many tokens back attention reaches; None for all.
        learns_positions: Whether positions are embedded, so that batches may have their own.
        multiple: Sequences are padded to a multiple of this.
        num_micro_batches: Micro-batches per batch.
        shares: Which tokens this rank computes.
        is_raw: Whether a function of the program reads micro-batches, so that they are only cut.
    """

    task: Task
    max_length: int
    window: int | None
    learns_positions: bool
    multiple: int
    num_micro_batches: int
    shares: SequenceShares = SequenceShares(0, 1)
    is_raw: bool = False
    _seen: set[tuple[int, ...]] = field(default_factory=set, init=False)

    def is_new(self, shape: tuple[int, ...]) -> bool:
        """Whether a shape of positions on an accelerator was not met before; to look into them makes the host wait."""
        is_new = shape not in self._seen
        self._seen.add(shape)
        return is_new


@dataclass(frozen=True)
class Batch:
    """A batch in micro-batches.

    Args:
        micro_batches: All of one shape.
        shape: Samples and tokens per sample of a micro-batch.
        num_samples, length: The size of the batch before padding.
        has_labels: Whether there is a loss.
    """

    micro_batches: list[MicroBatch]
    shape: tuple[int, int]
    num_samples: int
    length: int
    has_labels: bool


def make_batch(values: Mapping[str, Any], limits: Limits, device: torch.device, *, training: bool) -> Batch:
    """Check a batch and cut it into micro-batches.

    Args:
        values: The keyword arguments of the model's call: `input_ids` (batch, S), and what else the model reads.
        limits: What the model can take.
        device: Where the tensors go.
        training: Whether labels are needed; batches for evaluation are padded to a number of samples that can be cut.

    Raises:
        ValueError: The batch has something that cannot be used; the message says what.
    """
    values = {name: value for name, value in values.items() if value is not None and name not in WITHOUT_EFFECT}
    count = limits.num_micro_batches
    if limits.is_raw:
        _check_division(values, limits)
        columns = {name: value.to(device) for name, value in values.items()}
        samples, length = next(iter(columns.values())).shape[:2]
        return Batch(_cut(columns, count), (samples // count, length), samples, length, has_labels=True)
    if "tokens" in values:
        return _of_dataset(values, limits, device)
    _check(values, limits, training)
    samples, length = len(values["input_ids"]), limits.task.length(values)
    padded = _padded(values, limits, device)
    rows, width = len(padded["input_ids"]), limits.task.length(padded)
    has_labels = all(name in values for name in limits.task.labels)
    parts = _cut(limits.task.stage_inputs(padded, limits.shares.own(width, device)), count)
    return Batch(parts, (rows // count, width), samples, length, has_labels)


def _of_dataset(values: Mapping[str, Any], limits: Limits, device: torch.device) -> Batch:
    """A batch of Megatron-LM's datasets."""
    if "labels" not in values or (unknown := sorted(set(values) - OF_DATASETS)):
        wrong = "without 'labels'" if "labels" not in values else f"with {', '.join(map(repr, unknown))}"
        raise ValueError(
            f"The model got 'tokens', as of Megatron-LM's datasets, {wrong}. Pass {', '.join(sorted(OF_DATASETS))}."
        )
    _check_division(values, limits)
    samples, length = values["tokens"].shape
    if length > limits.max_length or length % limits.multiple:
        raise ValueError(
            f"tokens has {length} tokens per sample. Let seq_length be {limits.max_length} at most"
            + (f", and a multiple of {limits.multiple}." if limits.multiple > 1 else ".")
        )
    placed = {name: value.to(device) for name, value in values.items()}
    columns = limits.task.inputs_of_dataset(placed, limits.shares.own(length, device))
    count = limits.num_micro_batches
    return Batch(_cut(columns, count), (samples // count, length), samples, length, has_labels=True)


def _cut(columns: Mapping[str, Tensor], count: int) -> list[MicroBatch]:
    cut = {name: column.chunk(count) for name, column in columns.items()}
    return [{name: parts[number] for name, parts in cut.items()} for number in range(count)]


def _padded(values: Mapping[str, Any], limits: Limits, device: torch.device) -> dict[str, Tensor]:
    tokens = values["input_ids"]
    samples = len(tokens)
    more_samples = -samples % limits.num_micro_batches
    columns = {name: value.to(device) for name, value in values.items()}
    columns["position_ids"] = _positions(values.get("position_ids"), tokens, limits, device)
    mask = values.get("attention_mask", torch.ones_like(tokens))
    columns["attention_mask"] = mask.to(device).bool()
    columns["real"] = torch.ones(samples, dtype=torch.bool, device=device)
    for name, value in columns.items():
        filling = IGNORED if name in limits.task.labels and not value.is_floating_point() else 0
        by_token = name not in limits.task.per_sample and name != "real"
        more_tokens = -value.shape[1] % limits.multiple if by_token else 0
        padding = (0, more_tokens, 0, more_samples) if by_token else (*(0, 0) * (value.ndim - 1), 0, more_samples)
        columns[name] = F.pad(value, padding, value=filling)
    return columns


def _check(values: Mapping[str, Any], limits: Limits, training: bool) -> None:
    task = limits.task
    if unknown := sorted(set(values) - task.names):
        raise ValueError(
            f"The model got {', '.join(map(repr, unknown))}, which Megatron-LM cannot use. Pass {', '.join(sorted(task.names))} "
            "only."
        )
    needed = ("input_ids", *task.labels) if training else ("input_ids",)
    if missing := [name for name in needed if name not in values]:
        raise ValueError(
            f"The model was called without {missing[0]!r}. Pass it: model({', '.join(f'{name}=...' for name in needed)}). To get "
            "logits without a loss, call model.eval() first."
        )
    tokens = values["input_ids"]
    if tokens.ndim != 2:
        raise ValueError(f"input_ids has the shape {tuple(tokens.shape)}. Pass (samples, tokens).")
    _check_shapes(values, task)
    if training:
        _check_division(values, limits)
    length = tokens.shape[1]
    if length > limits.max_length:
        raise ValueError(
            f"input_ids has {length} tokens per sample, and the model takes {limits.max_length} at most. Shorten them."
        )
    if limits.window is not None and length > limits.window:
        raise ValueError(
            f"input_ids has {length} tokens per sample, more than the model's sliding window of {limits.window}, which "
            "megatron-core's attention does not have. Shorten them, or use FSDP or ParallelismConfig."
        )


def _check_shapes(values: Mapping[str, Any], task: Task) -> None:
    rows = values["input_ids"].shape[:1]
    first = {False: "input_ids"}  # of either sequence: the name whose shape the others have
    for name in ("labels", "attention_mask", "token_type_ids", "next_sentence_label", *sorted(task.of_outputs)):
        if name not in values:
            continue
        shape, per_sample = values[name].shape, name in task.per_sample
        other = first.setdefault(name in task.of_outputs, name)
        fits = shape == values[other].shape
        if per_sample or other == name:
            other, fits = "input_ids", shape[:1] == rows and (per_sample or len(shape) == 2)
        if not fits:
            raise ValueError(
                f"{name} has the shape {tuple(shape)}, and {other} has {tuple(values[other].shape)}. Megatron-LM takes one "
                f"entry per {'sample' if per_sample or shape[:1] != rows else 'token'}."
            )


def _check_division(values: Mapping[str, Any], limits: Limits) -> None:
    samples = len(next(iter(values.values())))
    if samples % limits.num_micro_batches:
        raise ValueError(
            f"num_micro_batches={limits.num_micro_batches} does not divide the {samples} samples of this batch. Use a "
            "prepared data loader, which reads that many batches at once, or batches of a multiple of that size."
        )


def _positions(position_ids: Tensor | None, tokens: Tensor, limits: Limits, device: torch.device) -> Tensor:
    """Positions of tokens, (batch, S)."""
    if position_ids is None:
        return torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    if not limits.learns_positions and (position_ids.device.type == "cpu" or limits.is_new(tuple(position_ids.shape))):
        usual = torch.arange(tokens.shape[1], device=position_ids.device)
        if not torch.equal(position_ids.expand_as(tokens), usual.expand_as(tokens)):
            raise ValueError(
                "position_ids are not 0, 1, 2, ... in every sample, but megatron-core's positions of this model are no "
                "others. Leave position_ids out, and pad on the right."
            )
    return position_ids.to(device).expand_as(tokens)
