"""Dtypes that every collective backend sends, and views of other tensors in them."""

from __future__ import annotations

import torch

SENT_AS_THEY_ARE = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool,
})  # fmt: skip


def as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a contiguous tensor that NCCL and gloo send to another rank: they have no complex numbers, no int16.

    Args:
        tensor: Of any dtype, without lazy conjugation or negation (`resolve_conj`, `resolve_neg`).

    Returns:
        The tensor itself; real and imaginary parts of complex numbers; or the bytes of other dtypes. Only for
        operations that do not compute: broadcasts, sends and receives.
    """
    if tensor.dtype in SENT_AS_THEY_ARE:
        return tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor.view(-1).view(torch.uint8)
