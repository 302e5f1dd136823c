"""Shards that keep only their own memory: in torch 2.9 those of `distribute_tensor` are views of the full tensor."""

from __future__ import annotations

from typing import Any

import torch


def keep_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the shard of a DTensor, in place, when it is a view of something larger.

    Args:
        tensor: What `distribute_tensor(..., src_data_rank=None)` returned; anything but a DTensor stays as it is.

    Returns:
        The same tensor.
    """
    local: Any = getattr(tensor, "_local_tensor", None)
    if local is not None and local.untyped_storage().nbytes() > local.numel() * local.itemsize:
        with torch.no_grad():
            tensor._local_tensor = local.detach().clone()  # type: ignore[attr-defined]
    return tensor
