"""Sharding a batch along its sequence dimension, with correct positions and shifted labels."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from accel_ops.nested import recursively_apply

LEADING = ("input_ids", "inputs_embeds", "labels")  # their second dimension is the sequence length
IGNORED_LABEL = -100
FULL_LENGTH = "_accelerate_full_length"
"""The attribute of a tensor that is a shard, for the length of the full sequence."""


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Labels aligned with the tokens that predict them.

    Args:
        labels: The token numbers of full sequences, int64 (batch, sequence).

    Returns:
        The label of the next token at each position, int64 (batch, sequence); -100 at the last one.
    """
    return pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


def length_of_full(tensor: torch.Tensor) -> int | None:
    """The length of the sequences that a tensor is a shard of; None for a tensor that no loader has sharded."""
    return getattr(tensor, FULL_LENGTH, None)


class ShardedBatch(dict[str, Any]):
    """A batch of sharded sequences with full `labels`, which gives their shard as `batch["shift_labels"]`."""

    def __init__(self, items: Any = (), /, shard: SequenceShard | None = None) -> None:
        super().__init__(items)
        self._sequence_shard = shard

    def __contains__(self, key: object) -> bool:
        """Whether there is such an item. Transformers' trainer is to find the full labels only: it divides their number by the ranks."""
        if key != "shift_labels" or super().__contains__(key):
            return super().__contains__(key)
        is_trainer = sys._getframe(1).f_globals.get("__name__", "").startswith("transformers.")
        return super().__contains__("labels") and not is_trainer

    def get(self, key: str, default: Any = None) -> Any:
        """The item of that name, if there is one."""
        try:
            return self[key]
        except KeyError:
            return default

    def __missing__(self, key: str) -> Any:
        """Shift and shard the labels."""
        if key != "shift_labels" or self._sequence_shard is None:
            raise KeyError(key)
        return self._sequence_shard.marked([self._sequence_shard.part_of(shifted(self["labels"]))])[0]


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """Shards batches along the sequence dimension, for sequence-parallel ranks, which get the same batch.

    Tensors of shape (batch, sequence, ...) are sharded; those without a dimension as long as the sequence are replicated.
    In a dictionary as transformers' models take it, `position_ids` are added first, because a shard does not begin at
    position 0. `labels` stay full, because the label of a shard's last token is in the next shard: prepared models shift and
    shard them, and so does `batch["shift_labels"]`.

    Args:
        index: The index of the shard, from 0.
        count: The number of shards.

    Example:
        ```python
        shard = SequenceShard(index=1, count=2)
        shard({"input_ids": torch.arange(8).view(1, 8)})["position_ids"]  # tensor([[4, 5, 6, 7]])
        ```
    """

    index: int
    count: int

    def __call__(self, batch: Any) -> Any:
        """This process's shard of a batch.

        Raises:
            ValueError: When sequences cannot be sharded evenly.
        """
        length = _sequence_length(batch)
        if length is None:
            return batch
        if length % self.count:
            raise ValueError(
                f"Sequences of {length} tokens cannot be sharded into {self.count} equal shards. Pad them, for example with "
                f"pad_to_multiple_of={self.count} of the tokenizer or collator."
            )
        pins = any(isinstance(tensor, torch.Tensor) and tensor.is_pinned() for tensor in _leading(batch))
        labels = None
        if isinstance(batch, Mapping):
            batch = _with_positions(dict(batch), length)
            if "shift_labels" not in batch:
                labels = batch.pop("labels", None)
        shard = recursively_apply(lambda tensor: self._shard(tensor, length), batch)
        if labels is not None:
            shard["labels"] = labels
        # A shard is in memory of its own. In pinned memory it is copied to the device without waiting, as the batch would be.
        return self.marked(recursively_apply(torch.Tensor.pin_memory, shard) if pins else shard)

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The shard of a tensor of full sequences, (batch, sequence, ...)."""
        size = tensor.shape[1] // self.count
        return tensor[:, self.index * size : (self.index + 1) * size].contiguous()

    def marked(self, shard: Any) -> Any:
        """A shard whose tensors say so, also after they were copied to a device.

        `Accelerator.maybe_context_parallel` leaves such tensors as they are.
        """
        is_named = isinstance(shard, dict)
        size = _sequence_length({name: shard[name] for name in shard if name != "labels"} if is_named else shard)
        if size is None:
            return shard
        recursively_apply(lambda tensor: self._mark(tensor, size), shard)
        return ShardedBatch(shard, self) if is_named and "labels" in shard else shard

    def _mark(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        if tensor.ndim >= 2 and tensor.shape[1] == size:
            setattr(tensor, FULL_LENGTH, size * self.count)
        return tensor

    def _shard(self, tensor: torch.Tensor, length: int) -> torch.Tensor:
        return self.part_of(tensor) if tensor.ndim >= 2 and tensor.shape[1] == length else tensor


def _leading(batch: Any) -> list[Any]:
    """The items of a batch whose second dimension is the sequence length."""
    if isinstance(batch, Mapping):
        return [batch[name] for name in LEADING if name in batch] or list(batch.values())
    return list(batch) if isinstance(batch, (list, tuple)) else [batch]


def _sequence_length(batch: Any) -> int | None:
    """The sequence length: the second dimension of a leading tensor of the batch; None if there is none."""
    for tensor in _leading(batch):
        if isinstance(tensor, torch.Tensor) and tensor.ndim >= 2:
            return int(tensor.shape[1])
    return None


def _with_positions(batch: dict[str, Any], length: int) -> dict[str, Any]:
    leading = next((batch[name] for name in LEADING if isinstance(batch.get(name), torch.Tensor)), None)
    if leading is not None and batch.get("position_ids") is None:
        positions = torch.arange(length, device=leading.device)
        batch["position_ids"] = positions.expand(leading.shape[0], length)
    return batch
