"""Kernels of GPUs that the CPU has under another name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """What the kernel returns: output, log-sum-exp, and what its backward pass needs of random numbers."""
    output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, scale=scale
    )
    seed = torch.zeros((), dtype=torch.int64)
    nothing = torch.empty(0)
    return output, logsumexp, None, None, query.shape[2], key.shape[2], seed, seed, nothing


def flash_attention_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor,
    logsumexp: torch.Tensor, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    seed: Any, offset: Any, *, scale: float | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Gradients of queries, keys and values."""
    actual: tuple[torch.Tensor, ...] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, logsumexp, dropout_p, is_causal, scale=scale
    )
    return actual


ON_CPU: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention.default: flash_attention,
    aten._scaled_dot_product_flash_attention_backward.default: flash_attention_backward,
}
