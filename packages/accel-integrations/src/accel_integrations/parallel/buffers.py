"""The tensors of a batch that a block of `Accelerator.maybe_context_parallel` shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from accel_data.sequence_shard import length_of_full


def check_buffers(
    buffers: Sequence[torch.Tensor] | None,
    dims: Sequence[int] | None,
    no_restore: set[torch.Tensor] | None,
    option: str,
    size: int,
) -> tuple[list[torch.Tensor], list[int]]:
    """The buffers, and the sequence dimension of each, counted from the first.

    Args:
        buffers: Tensors of full sequences, or shards of a prepared loader.
        dims: The index of the sequence dimension of each.
        no_restore: The buffers that need not be restored.
        option: The name of the setting that says how many shards there are, for messages.
        size: The number of shards.

    Raises:
        ValueError: They cannot be sharded in place; the message says why.
    """
    tensors, along = list(buffers or ()), list(dims or ())
    if not tensors or len(tensors) != len(along):
        raise ValueError(
            f"maybe_context_parallel() got {len(tensors)} buffers and {len(along)} sequence dimensions. Pass the tensors "
            "of the batch that have a sequence dimension, and the index of that dimension for each of them."
        )
    foreign = [other for other in no_restore or () if all(other is not buffer for buffer in tensors)]
    if foreign:
        raise ValueError(
            f"no_restore_buffers has {len(foreign)} tensors that are not among the buffers. Pass only buffers that "
            "need not be restored afterwards."
        )
    full_length = next(filter(None, map(length_of_full, tensors)), None)
    for index, (buffer, dim) in enumerate(zip(tensors, along, strict=True)):
        problem = None
        if not -buffer.ndim <= dim < buffer.ndim:
            problem = f"has no dimension {dim}"
        elif length_of_full(buffer) is not None:
            continue
        elif full_length is not None and buffer.shape[dim] != full_length:
            problem = (
                f"was made from a batch that the prepared data loader has sharded, whose sequences have {full_length} tokens: "
                "use the position_ids and shift_labels of that batch, or a loader that is not prepared"
            )
        elif buffer.shape[dim] % size:
            problem = f"has {buffer.shape[dim]} tokens, which {option}={size} does not divide: pad the sequences"
        elif buffer.requires_grad:
            problem = "requires gradients, so that it cannot be sharded in place: pass inputs, not parameters"
        if problem:
            raise ValueError(f"Buffer {index} of shape {tuple(buffer.shape)} {problem}.")
    return tensors, [dim % buffer.ndim for buffer, dim in zip(tensors, along, strict=True)]
