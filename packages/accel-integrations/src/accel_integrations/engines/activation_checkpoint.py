"""Activations that backward recomputes instead of keeping them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def checkpoint_blocks(model: nn.Module, blocks: Sequence[nn.Module], *, offload: bool = False) -> list[nn.Module]:
    """Have blocks of a model keep only their inputs in forward.

    Args:
        model: The model, in which the blocks are replaced by wrapped ones.
        blocks: Modules inside it.
        offload: Also move what is kept to CPU memory; without effect where it is there anyway.

    Returns:
        The wrapped blocks.
    """
    if not blocks:
        return []
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
        offload_wrapper,
    )

    chosen = set(blocks)
    offloads = offload and torch.accelerator.is_available()
    wrapped: dict[nn.Module, nn.Module] = {}

    def wrap(module: nn.Module) -> nn.Module:
        checkpointed = checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        wrapped[module] = offload_wrapper(checkpointed) if offloads else checkpointed
        return wrapped[module]

    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: module in chosen)
    return [wrapped[block] for block in blocks]
