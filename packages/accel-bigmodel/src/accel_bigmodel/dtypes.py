"""Dtypes and their names."""

from __future__ import annotations

from typing import Any

import torch


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype that is meant by a name such as `"float16"` or `"torch.float16"`; a dtype is returned as it is.

    Raises:
        ValueError: torch has no dtype of that name.
    """
    torch_dtype: Any = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(torch_dtype, torch.dtype):
        raise ValueError(f"dtype={dtype!r} is not a torch dtype: use one such as torch.float16 or 'float16'.")
    return torch_dtype
