"""A loss that is the mean over all tokens, wherever they are."""

from __future__ import annotations

from typing import Any

import torch

from accel_integrations.parallel.module_states import all_reduce_over_group


def mean_over_tokens(loss: torch.Tensor, num_tokens: torch.Tensor | int, group: Any, size: int) -> torch.Tensor:
    """The mean over the tokens of all processes, from each process's own mean.

    Gradients are right where the engine averages them over the same processes: what each contributes is weighted by
    its tokens. Own tokens may be none; then `loss` may be not a number, as the mean of nothing is.

    Args:
        loss: 0-dim, the mean over `num_tokens` tokens.
        num_tokens: How many tokens this process's loss counts.
        group: The processes whose gradients are averaged; all when None.
        size: By which number the sum of their gradients is divided.

    Returns:
        0-dim, equal on all processes.
    """
    own = torch.as_tensor(num_tokens, dtype=loss.dtype, device=loss.device).detach()
    loss = torch.where(own > 0, loss, loss.nan_to_num() * 0)
    counted = torch.stack([own, loss.detach() * own])
    total, summed = all_reduce_over_group(counted, group).unbind()
    share = loss * (own * size / total.clamp(min=1))
    return share + (summed / total.clamp(min=1) - share).detach()
