"""What is sent between the stages of a pipeline: tensors of known shapes, in known structures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

PLAIN = (bool, int, float, str)


@dataclass(frozen=True)
class TensorShape:
    """Shape and dtype of a tensor.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        needs_grad: Whether it requires grad.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorShape:
        """The shape of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device | str, rows: int = 1) -> torch.Tensor:
        """An uninitialized tensor of this shape, with the first dimension, if any, multiplied by `rows`."""
        shape = (self.shape[0] * rows, *self.shape[1:]) if self.shape else ()
        return torch.empty(shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Structure:
    """The nested structure that a module returned, with shapes in place of tensors.

    Attributes:
        tree: How leaves are nested.
        leaves: For each leaf, the `TensorShape`, or the plain value itself.
    """

    tree: TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, output: Any) -> Structure:
        """The structure of an output; leaves that are neither tensors nor plain values become None."""
        leaves, tree = tree_flatten(output)
        return cls(tree, tuple(map(_described, leaves)))

    def __reduce__(self) -> Any:
        """Pickle as an ordinary nested object: a `TreeSpec` has no stable pickled form."""
        return _structure_like, (tree_unflatten(list(range(len(self.leaves))), self.tree), self.leaves)

    @property
    def tensors(self) -> list[TensorShape]:
        """The leaves that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorShape)]

    def filled(self, tensors: Sequence[torch.Tensor | None]) -> Any:
        """The structure, filled with other tensors."""
        values = iter(tensors)
        return tree_unflatten(
            [next(values) if isinstance(leaf, TensorShape) else leaf for leaf in self.leaves], self.tree
        )

    def placeholder(self, device: torch.device, content: float) -> Any:
        """The structure, filled with constant tensors: floating-point ones of `content`, others of zeros."""
        return self.filled(
            [
                torch.full(
                    shape.shape, content if shape.dtype.is_floating_point else 0, dtype=shape.dtype, device=device
                )
                for shape in self.tensors
            ]
        )


def _structure_like(example: Any, leaves: tuple[Any, ...]) -> Structure:
    return Structure(tree_flatten(example)[1], leaves)


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return TensorShape.of(leaf)
    return leaf if isinstance(leaf, PLAIN) else None


def tensors_in(output: Any) -> list[torch.Tensor]:
    """The tensors of a nested structure, in the order of `Structure.tensors`."""
    return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]
