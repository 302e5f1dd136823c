"""The all-to-alls of sequence parallelism: from shards of sequences to shares of the attention heads, and back.

Source: DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from accel_ops.collectives.transport import TorchTransport

SETTING = 'Sequence parallelism (sp_backend="torch")'


def scatter_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Full sequences for this rank's share of the heads; keys and values of fewer heads than ranks are replicated.

    Args:
        query: Of shape (batch, heads, local sequence length, features), as are the others.
        key: Its heads divide those of the queries.
        value: As above.
        group: The process group; rank i holds shard i of the sequences.

    Returns:
        Three tensors of shape (batch, heads / ranks, sequence length, features).

    Raises:
        ValueError: The ranks do not divide the heads of the queries.
    """
    size = dist.get_world_size(group)
    heads, key_heads = query.shape[1], key.shape[1]
    if heads % size:
        raise ValueError(uneven_heads(heads, size))
    repeats = size // math.gcd(key_heads, size)
    if heads % (key_heads * repeats):
        repeats = heads // key_heads
    if repeats > 1:
        key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
    if query.shape[2:] == key.shape[2:] == value.shape[2:]:
        return _exchanged([query, key, value], group)
    return tuple(_exchanged([states], group)[0] for states in (query, key, value))


def _exchanged(tensors: list[torch.Tensor], group: Any) -> Any:
    """Tensors of one local length and number of features, in one all-to-all."""
    size = dist.get_world_size(group)
    shares = [tensor.shape[1] // size for tensor in tensors]
    by_rank = torch.cat([tensor.unflatten(1, (size, -1)) for tensor in tensors], dim=2).transpose(0, 1)
    received = _AllToAll.apply(by_rank, group)
    return received.movedim(0, 2).flatten(2, 3).split(shares, dim=1)


def gather_heads(output: torch.Tensor, group: Any, heads_dim: int = 1) -> torch.Tensor:
    """Local sequences of all heads: the inverse of `scatter_heads`.

    Args:
        output: Of shape (batch, heads / ranks, sequence length, features).
        group: As for `scatter_heads`.
        heads_dim: 2 for a tensor, and a result, with the sequence before the heads.

    Returns:
        A tensor of shape (batch, heads, local sequence length, features).
    """
    sequence_dim = 3 - heads_dim
    by_rank = output.unflatten(sequence_dim, (dist.get_world_size(group), -1)).movedim(sequence_dim, 0)
    return _AllToAll.apply(by_rank, group).movedim(0, heads_dim).flatten(heads_dim, heads_dim + 1)


class _AllToAll(torch.autograd.Function):
    """Sends row i of the first dimension to rank i of the group; gradients take the same all-to-all."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        sent = rows.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(gradient, ctx.group), None


def gathered(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The tensors of all ranks of a group, along a new first dimension."""
    size = dist.get_world_size(group)
    return TorchTransport(group).all_gather(tensor.flatten(), size).view(size, *tensor.shape)


def uneven_heads(heads: int, size: int) -> str:
    """The message about heads that the ranks do not divide."""
    return (
        f"{SETTING} cannot split {heads} attention heads evenly over {size} ranks. Choose a size that divides the "
        "heads, or use cp_size instead."
    )
