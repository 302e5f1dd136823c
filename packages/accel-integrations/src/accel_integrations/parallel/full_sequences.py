"""What the ranks that share sequences tell each other before a forward pass of a transformers model.

Each is called with its shard. They gather positions and masks, and refuse on all ranks what does not fit together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel_data.sequence_shard import SequenceShard, shifted
from accel_integrations.parallel.ulysses import SETTING, gathered
from accel_state.warning import warn_user

INSTEAD = "Train it without sharding sequences (sp_size=1)"


@dataclass(eq=False)
class SequenceGroup:
    """The ranks that hold the shards of a model's sequences.

    Attributes:
        group: The process group; rank i holds shard i.
        num_calls: How often an attention function got full sequences.
        prepare: Called before each forward pass of shards.
        is_paused: Whether the sequences of the running forward pass are not sharded, as when text is generated.
    """

    group: Any
    prepare: Callable[[], None]
    num_calls: int = 0
    is_paused: bool = False

    def __deepcopy__(self, memo: Any) -> SequenceGroup:
        return self


@dataclass(frozen=True)
class FullSequences:
    """The full sequences that the ranks were called with shards of.

    Attributes:
        length: The sequence length.
        positions: int64 (batch, sequence).
        mask: bool (batch, sequence), or with four dimensions as the program made it; None for none.
    """

    length: int
    positions: torch.Tensor
    mask: torch.Tensor | None


FULL: ContextVar[FullSequences | None] = ContextVar("full_sequences", default=None)
"""Those of the running forward pass."""


def argument_names(model: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of a model's forward pass."""
    return tuple(signature(type(model).forward).parameters)[1:]


class Exchange:
    """Gathers positions and masks of all ranks before a forward pass; all ranks raise the same error."""

    def __init__(self, model: Any, shards: SequenceGroup) -> None:
        from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

        self.shards = shards
        self.names = argument_names(model)
        self.shifts_labels = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "") is ForCausalLMLoss
        self._shard = SequenceShard(dist.get_rank(shards.group), dist.get_world_size(shards.group))
        self._is_checked = False
        self._tokens: list[Any] = []

    @torch.compiler.disable
    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Exchange what the ranks were called with, and complete the arguments."""
        arguments: dict[str, Any] = {**dict(zip(self.names, args, strict=False)), **kwargs}
        tokens, embeddings = arguments.get("input_ids"), arguments.get("inputs_embeds")
        inputs: Any = embeddings if tokens is None else tokens
        self._tokens.append(FULL.set(None))
        cache = arguments.get("past_key_values")
        if inputs is None or (cache is not None and not _generates(cache, inputs)):
            what = (
                "without input_ids and inputs_embeds"
                if inputs is None
                else "with past_key_values, as prefix tuning does"
            )
            raise ValueError(
                f"{SETTING}: {type(model).__name__} was called {what}, which cannot be sharded. {INSTEAD}."
            )
        self.shards.is_paused = cache is not None
        if self.shards.is_paused:
            return None
        if not self._is_checked and arguments.get("num_items_in_batch") is not None:
            _warn_of_trainer(self._shard.count)
        self.shards.prepare()
        full = self._full_sequences(inputs, arguments)
        labels = self._labels(arguments, inputs.shape[1])
        mask = arguments.get("attention_mask")
        if mask is not None and mask.ndim == 2 and mask.shape[1] == full.length:
            arguments["attention_mask"] = self._shard.part_of(mask)
        FULL.set(full)
        return (), {**arguments, **labels}

    @torch.compiler.disable
    def after(self, model: Any, *_: Any) -> None:
        """Forget the sequences, and check once that an attention function was called."""
        was_sharded = FULL.get() is not None
        FULL.reset(self._tokens.pop())
        self.shards.is_paused = False
        if was_sharded and not self._is_checked and sys.exc_info()[0] is None:
            self._is_checked = True
            if self.shards.num_calls == 0:
                raise RuntimeError(
                    f"{SETTING}: the forward of {type(model).__name__} never called an attention function of transformers, so "
                    f"that its attention, if it has one, would see only this rank's shard of the sequence. {INSTEAD}."
                )

    def _full_sequences(self, inputs: torch.Tensor, arguments: dict[str, Any]) -> FullSequences:
        positions: Any
        mask: Any
        positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
        batch, length = inputs.shape[:2]
        group, size = self.shards.group, self._shard.count
        kind = _kind_of(mask, length, size)
        fits = positions is not None and positions.ndim <= 2 and positions.shape[-1] == length
        facts = torch.tensor([batch, length, positions is None, fits, kind], device=inputs.device)
        fingerprint = _fingerprint(inputs, positions if fits else None, self._shard.index)
        rows = gathered(torch.cat([facts, fingerprint]), group)
        if not _fit(rows).all():
            raise ValueError(f"{SETTING}: {_problem_of(rows.tolist(), mask)}.")
        if kind == LOCAL_MASK:
            sent = torch.stack([positions.expand(batch, length).long(), mask.long()])
        else:
            sent = positions.expand(1, batch, length).long()
        of_full = gathered(sent, group).movedim(0, 2).flatten(2)
        full_mask = of_full[1].bool() if kind == LOCAL_MASK else mask
        return FullSequences(size * length, of_full[0], full_mask)

    def _labels(self, arguments: dict[str, Any], length: int) -> dict[str, torch.Tensor]:
        """Labels of this rank's shard, as the model's loss takes them."""
        labels, shifted_labels = arguments.get("labels"), arguments.get("shift_labels")
        if shifted_labels is not None:
            if shifted_labels.shape[1] != length:
                shifted_labels = self._shard.part_of(shifted_labels)
            return {"labels": shifted_labels, "shift_labels": shifted_labels}
        if labels is None or labels.ndim < 2:
            return {}
        is_full = labels.shape[1] == length * self._shard.count
        if not self.shifts_labels:
            return {"labels": self._shard.part_of(labels) if is_full else labels}
        if not is_full:
            raise ValueError(
                f"{SETTING}: labels of shape {tuple(labels.shape)} are those of a shard, whose last token has its label in the "
                "next shard. Shift labels before they are sharded, and pass them as shift_labels."
            )
        part = self._shard.part_of(shifted(labels))
        return {"labels": part, "shift_labels": part}


def _generates(cache: Any, inputs: torch.Tensor) -> bool:
    """Whether a forward pass with a cache generates text: it begins with an empty cache, and goes on token by token."""
    length = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 1
    return not torch.is_grad_enabled() and (length == 0 or inputs.shape[1] == 1)


def _warn_of_trainer(size: int) -> None:
    """Say how transformers' Trainer counts, which expects of a loader under sequence parallelism what DeepSpeed's does."""
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    names = getattr(
        getattr(trainer, "set_initial_training_values", None), "__code__", _warn_of_trainer.__code__
    ).co_names
    if "get_sp_size" in names and "sp_backend" not in names:
        warn_user(
            f"transformers' Trainer multiplies the number of batches of an epoch by sp_size={size}. If it runs this loop, max_steps "
            f"ends it after 1/{size} of the epochs unless they all are in the first one, and the learning rate changes over {size} "
            f"times the steps. Train by num_train_epochs with a constant learning rate, or write the loop yourself."
        )


NO_MASK, LOCAL_MASK, FULL_MASK, OTHER_MASK = range(4)


def _kind_of(mask: Any, length: int, size: int) -> int:
    """Which tokens a mask is for: those of the shard, or of full sequences."""
    if mask is None:
        return NO_MASK
    shape: tuple[int, ...] = tuple(getattr(mask, "shape", ()))
    if len(shape) == 2 and shape[1] == length:
        return LOCAL_MASK
    is_full = (len(shape) == 2 and shape[1] == size * length) or (len(shape) == 4 and shape[-1] == size * length)
    return FULL_MASK if is_full else OTHER_MASK


def _fingerprint(inputs: torch.Tensor, positions: torch.Tensor | None, index: int) -> torch.Tensor:
    """Two numbers that differ between ranks whose tokens or positions do, int64 (2,)."""
    if inputs.ndim > 2 or positions is None:  # embeddings are not compared
        return torch.tensor([index, index], device=inputs.device)
    weights = torch.arange(1, inputs.shape[1] + 1, device=inputs.device)
    return torch.stack([(tensor.long() * weights).sum() for tensor in (inputs, positions)])


def _fit(rows: torch.Tensor) -> torch.Tensor:
    """Whether the ranks were called with shards of the same sequences: one read by the host, where nothing is wrong.

    Args:
        rows: For each rank batch size, local length, whether positions are missing, whether they fit, the kind of mask, and
            the fingerprint, int64 (ranks, 7).

    Returns:
        A bool tensor; all of it is true if they were.
    """
    differ = rows != rows[:1]
    are_same = ~differ[:, 5:].any()
    return torch.cat(
        [~differ[:, [0, 1, 4]].flatten(), rows[:, 2] == 0, rows[:, 3] == 1, rows[:, 4] != OTHER_MASK, ~are_same[None]]
    )


def _problem_of(rows: list[list[int]], mask: Any) -> str:
    """What is wrong, as a clause, where `_fit` found something."""
    shapes = [tuple(row[:2]) for row in rows]
    if len(set(shapes)) > 1:
        each = ", ".join(f"rank {rank} has {batch} x {length}" for rank, (batch, length) in enumerate(shapes))
        return f"the ranks were called with different numbers of tokens ({each}). Shard the batch on every rank, or on none"
    if any(row[2] for row in rows):
        return (
            "the model was called without position_ids, so that every rank would count its tokens from 0. Pass those of the "
            "full sequences, sharded as input_ids: 0, 1, 2, ... without packing"
        )
    if not all(row[3] for row in rows):
        return "position_ids must have the shape of input_ids, (batch, sequence)"
    if any(row[4] != rows[0][4] or row[4] == OTHER_MASK for row in rows):
        shape = getattr(mask, "shape", None)
        described = type(mask).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")
        return (
            f"attention_mask is a {described}. Every rank needs one of the shape of input_ids, or that of the full sequences: "
            "(batch, sequence), or (batch, 1 or heads, sequence, sequence)"
        )
    return (
        "every rank was called with the same tokens at the same positions, not with its shard of the sequences. Prepare the "
        "data loader, or shard the batch with accelerator.maybe_context_parallel"
    )
