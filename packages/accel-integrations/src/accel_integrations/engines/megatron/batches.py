"""Batches of a Hugging Face model as megatron-core takes them: shifted labels, full masks, micro-batches.

Legend: B = samples of a micro-batch, S = sequence length in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
"""The label of tokens that count for nothing."""
KNOWN = frozenset({"input_ids", "labels", "attention_mask", "position_ids"})
WITHOUT_EFFECT = frozenset({"use_cache", "return_dict", "output_attentions", "output_hidden_states"})


@dataclass(frozen=True)
class MicroBatch:
    """What a stage gets of one micro-batch.

    Args:
        tokens: int64 (B, S).
        positions: int64 (B, S).
        hidden: True where a token does not see another, bool (B, 1, S, S).
        labels: The next tokens, int64 (B, S); None where there are none.
        counted: Which of them count, bool (B, S); None without labels.
    """

    tokens: Tensor
    positions: Tensor
    hidden: Tensor
    labels: Tensor | None = None
    counted: Tensor | None = None


@dataclass(frozen=True)
class Limits:
    """What a model can take.

    Args:
        max_length: Longest sequence in tokens.
        window: How many tokens back attention reaches; None for all.
        learns_positions: Whether positions are embedded, so that batches may have their own.
        multiple: Sequences are padded to a multiple of this.
        num_micro_batches: Micro-batches per batch.
    """

    max_length: int
    window: int | None
    learns_positions: bool
    multiple: int
    num_micro_batches: int


@dataclass(frozen=True)
class Batch:
    """A batch in micro-batches.

    Args:
        micro_batches: All of one shape.
        num_samples, length: The size of the batch before padding.
    """

    micro_batches: list[MicroBatch]
    num_samples: int
    length: int

    @property
    def shape(self) -> tuple[int, int]:
        """Samples and tokens per sample of a micro-batch."""
        samples, length = self.micro_batches[0].tokens.shape
        return samples, length


def make_batch(values: Mapping[str, Any], limits: Limits, device: torch.device, *, training: bool) -> Batch:
    """Check a batch and cut it into micro-batches.

    Args:
        values: The keyword arguments of the model's call: `input_ids` (batch, S), and perhaps `labels` (batch, S),
            `attention_mask` (batch, S) and `position_ids`.
        limits: What the model can take.
        device: Where the tensors go.
        training: Whether labels are needed; batches for evaluation are padded to a number of samples that can be cut.

    Raises:
        ValueError: The batch has something that cannot be used; the message says what.
    """
    values = {name: value for name, value in values.items() if value is not None and name not in WITHOUT_EFFECT}
    _check(values, limits, training)
    tokens = values["input_ids"].to(device)
    samples, length = tokens.shape
    mask = values.get("attention_mask", torch.ones_like(tokens)).to(device).bool()
    labels = values.get("labels")
    if labels is not None:
        labels = F.pad(labels.to(device)[:, 1:], (0, 1), value=IGNORED)
    positions = _positions(values.get("position_ids"), tokens, limits)
    more_samples, more_tokens = -samples % limits.num_micro_batches, -length % limits.multiple

    def padded(value: Tensor, filling: int) -> Tensor:
        return F.pad(value, (0, more_tokens, 0, more_samples), value=filling)

    tokens, mask, positions = padded(tokens, 0), padded(mask, 0), padded(positions, 0)
    hidden = _hidden(mask)
    columns = [tokens, positions, hidden]
    if labels is not None:
        labels = padded(labels, IGNORED)
        columns += [labels.clamp(min=0), labels != IGNORED]
    cut = [column.chunk(limits.num_micro_batches) for column in columns]
    parts = [MicroBatch(*one) for one in zip(*cut, strict=True)]
    return Batch(parts, samples, length)


def _check(values: Mapping[str, Any], limits: Limits, training: bool) -> None:
    if unknown := sorted(set(values) - KNOWN):
        raise ValueError(
            f"The model got {', '.join(map(repr, unknown))}, which Megatron-LM cannot use. Pass {', '.join(sorted(KNOWN))} "
            "only."
        )
    if "input_ids" not in values or (training and "labels" not in values):
        missing = "input_ids" if "input_ids" not in values else "labels"
        raise ValueError(
            f"The model was called without {missing!r}. Pass it: model(input_ids=..., labels=...). To get logits without a "
            "loss, call model.eval() first."
        )
    tokens = values["input_ids"]
    if tokens.ndim != 2:
        raise ValueError(f"input_ids has the shape {tuple(tokens.shape)}. Pass (samples, tokens).")
    for name in ("labels", "attention_mask"):
        if name in values and values[name].shape != tokens.shape:
            raise ValueError(
                f"{name} has the shape {tuple(values[name].shape)}, and input_ids has {tuple(tokens.shape)}. Megatron-LM "
                "takes one entry per token."
            )
    samples, length = tokens.shape
    if training and samples % limits.num_micro_batches:
        raise ValueError(
            f"num_micro_batches={limits.num_micro_batches} does not divide the {samples} samples of this batch. Use a "
            "prepared data loader, which reads that many batches at once, or batches of a multiple of that size."
        )
    if length > limits.max_length:
        raise ValueError(
            f"input_ids has {length} tokens per sample, and the model takes {limits.max_length} at most. Shorten them."
        )
    if limits.window is not None and length > limits.window:
        raise ValueError(
            f"input_ids has {length} tokens per sample, more than the model's sliding window of {limits.window}, which "
            "megatron-core's attention does not have. Shorten them, or use FSDP or ParallelismConfig."
        )


def _positions(given: Tensor | None, tokens: Tensor, limits: Limits) -> Tensor:
    """Positions of tokens, (batch, S)."""
    usual = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if given is None:
        return usual
    given = given.to(tokens.device).expand_as(tokens)
    if not limits.learns_positions and not torch.equal(given, usual):
        raise ValueError(
            "position_ids are not 0, 1, 2, ... in every sample, but megatron-core's rotary embeddings have no others. "
            "Leave position_ids out, and pad on the right."
        )
    return given


def _hidden(mask: Tensor) -> Tensor:
    """Which tokens each token does not see: later ones and padding; bool (batch, 1, S, S)."""
    length = mask.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
    return later | ~mask[:, None, None, :]
