"""Splitting a batch into micro-batches, and joining the outputs of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from accel_integrations.parallel.pipeline.shapes import PLAIN, TensorShape

NUM_ITEMS = "num_items_in_batch"
"""Argument of transformers models that divide their loss by the number of items of the full batch."""


@dataclass(frozen=True)
class Microbatches:
    """The arguments of a model's forward, split along the first dimension.

    Attributes:
        inputs: The positional and keyword arguments of each micro-batch.
        weights: The weight of the loss of each.
        signature: Equal for batches whose micro-batches have the same shapes.
    """

    inputs: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]
    weights: tuple[Any, ...]
    signature: Any

    def __len__(self) -> int:
        return len(self.inputs)


def find_size(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """The batch size: the first dimension of the first tensor that has any.

    Raises:
        ValueError: When there is no such tensor.
    """
    for leaf in tree_flatten((args, kwargs))[0]:
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return leaf.shape[0]
    raise ValueError(
        "The pipelined model got no tensor with a batch dimension, so there is nothing to split into micro-batches. "
        "Pass the batch as arguments of the model."
    )


def split_batch(
    args: Sequence[Any], kwargs: dict[str, Any], count: int, loss_weight: Callable[[dict[str, Any]], Any] | None = None
) -> Microbatches:
    """Split a batch into micro-batches of equal size.

    Args:
        args: Positional arguments; every tensor in them whose first dimension is the batch size is split, everything
            else is passed to each micro-batch.
        kwargs: Keyword arguments, in the same way.
        count: Number of micro-batches; it divides the batch size.
        loss_weight: Called with the keyword arguments of a micro-batch; returns the weight of its loss.
    """
    size = find_size(args, kwargs)
    leaves, tree = tree_flatten((tuple(args), kwargs))
    pieces = [_pieces(leaf, size, count) for leaf in leaves]
    parts = tuple(tree_unflatten([piece[index] for piece in pieces], tree) for index in range(count))
    signature = (tree, tuple(_signed(piece[0]) for piece in pieces), count)
    return Microbatches(parts, _weights(parts, kwargs, loss_weight), signature)


def _pieces(leaf: Any, size: int, count: int) -> Sequence[Any]:
    if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == size:
        return leaf.chunk(count)
    return [leaf] * count


def _signed(leaf: Any) -> Any:
    """What must be equal so that modules return tensors of the same shapes."""
    if isinstance(leaf, torch.Tensor):
        shape = TensorShape.of(leaf)
        return shape.shape, shape.dtype
    return leaf if isinstance(leaf, PLAIN) else type(leaf)


def _weights(
    parts: Sequence[Any], kwargs: dict[str, Any], loss_weight: Callable[[dict[str, Any]], Any] | None
) -> tuple[Any, ...]:
    if kwargs.get(NUM_ITEMS) is not None:
        return (1.0,) * len(parts)  # each loss is a summand of the full batch's loss
    if loss_weight is None:
        return (1.0 / len(parts),) * len(parts)
    weights = [loss_weight(part_kwargs) for _, part_kwargs in parts]
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def join_outputs(outputs: Sequence[Sequence[torch.Tensor]], weights: Sequence[Any]) -> list[torch.Tensor]:
    """Join the outputs of a model for each micro-batch.

    Args:
        outputs: The tensors of each micro-batch.
        weights: The weights of 0-dim tensors, such as losses.

    Returns:
        The tensors for the full batch: concatenated along the first dimension; of 0-dim tensors, the weighted sum of
        floats, or the first of others.
    """
    return [_joined(tensors, weights) for tensors in zip(*outputs, strict=True)]


def _joined(tensors: Sequence[torch.Tensor], weights: Sequence[Any]) -> torch.Tensor:
    if tensors[0].ndim:
        return torch.cat([tensor.detach() for tensor in tensors])
    if not tensors[0].is_floating_point():
        return tensors[0]
    total = torch.zeros_like(tensors[0])
    for tensor, weight in zip(tensors, weights, strict=True):
        total += tensor.detach() * weight
    return total


def split_gradients(
    gradients: Sequence[torch.Tensor | None], count: int, weights: Sequence[Any]
) -> list[list[torch.Tensor | None]]:
    """Split the gradients of joined outputs into those of each micro-batch: the backward of `join_outputs`."""
    by_batch: list[list[torch.Tensor | None]] = [[] for _ in range(count)]
    for gradient in gradients:
        if gradient is None:
            chunks: Sequence[torch.Tensor | None] = [None] * count
        elif gradient.ndim:
            chunks = gradient.chunk(count)
        else:
            chunks = [gradient * weight for weight in weights]
        for index in range(count):
            by_batch[index].append(chunks[index])
    return by_batch
