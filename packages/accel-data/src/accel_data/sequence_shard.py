"""Sharding a batch along its sequence dimension, with correct positions and shifted labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from accel_ops.nested import recursively_apply

LEADING = ("input_ids", "inputs_embeds", "labels")  # their second dimension is the sequence length
IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """Shards batches along the sequence dimension, for context- or sequence-parallel ranks, which get the same batch.

    Tensors of shape (batch, sequence, ...) are sharded; those without a dimension as long as the sequence are replicated.
    In a dictionary as transformers' models take it, two entries are added first: `position_ids`, because a shard does
    not begin at position 0, and `shift_labels`, made from `labels` and aligned with the tokens, because the label of a
    shard's last token is in the next shard. `labels` itself is removed, so that no model shifts it again. A padding
    mask is sharded if sequences are only padded at their end; models drop it (sequence parallelism's transform).

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
        if isinstance(batch, Mapping):
            batch = _with_positions_and_labels(dict(batch), length)
        shard = recursively_apply(lambda tensor: self._shard(tensor, length), batch)
        # A shard is in memory of its own. In pinned memory it is copied to the device without waiting, as the batch would be.
        return recursively_apply(torch.Tensor.pin_memory, shard) if pins else shard

    def _shard(self, tensor: torch.Tensor, length: int) -> torch.Tensor:
        if tensor.ndim < 2 or tensor.shape[1] != length:
            return tensor
        size = length // self.count
        return tensor[:, self.index * size : (self.index + 1) * size].contiguous()


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


def _with_positions_and_labels(batch: dict[str, Any], length: int) -> dict[str, Any]:
    leading = next((batch[name] for name in LEADING if isinstance(batch.get(name), torch.Tensor)), None)
    if leading is None:
        return batch
    if batch.get("position_ids") is None:
        positions = torch.arange(length, device=leading.device)
        batch["position_ids"] = positions.expand(leading.shape[0], length)
    labels = batch.pop("labels", None)
    if labels is not None and batch.get("shift_labels") is None:
        last = labels.new_full((labels.shape[0], 1), IGNORED_LABEL)
        batch["shift_labels"] = torch.cat([labels[:, 1:], last], dim=1)
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ValueError(
            "The batch is padded at the beginning of sequences, or masks tokens in their middle, which attention "
            "over shards of sequences cannot take into account. Pad at the end (padding_side='right')."
        )
    return batch
