"""Where a training step on a GPU needs other memory than one on the CPU, the operations of the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class GpuOperations(TorchFunctionMode):
    """Replaces operations by those that allocate what a GPU would allocate, for tensors without values.

    - Dropout keeps a mask of one byte per value, not a tensor of the input's dtype.
    - Attention with dropout is fused, so that the matrix of attention weights is never there.
    - Autocast computes norms, softmax and losses in float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation or what stands for it."""
        return REPLACED.get(func, func)(*args, **(kwargs or {}))


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0.0 or inplace:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _attention(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(*args, **kwargs)


def _in_float32(operation: Callable[..., Any]) -> Callable[..., Any]:
    def call(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return operation(input, *args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return operation(input.float(), *args, **kwargs)

    return call


FLOAT32 = (
    F.layer_norm, F.group_norm, F.softmax, torch.softmax, torch.Tensor.softmax, F.log_softmax, torch.log_softmax,
    F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.cosine_similarity, F.softplus,
)  # fmt: skip
REPLACED: dict[Any, Callable[..., Any]] = {
    **{operation: _in_float32(operation) for operation in FLOAT32},
    F.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
}
