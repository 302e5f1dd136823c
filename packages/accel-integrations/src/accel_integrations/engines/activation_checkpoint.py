"""Activation checkpointing: the backward pass recomputes activations instead of keeping them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def checkpoint_blocks(model: nn.Module, blocks: Sequence[nn.Module], *, offload: bool = False) -> list[nn.Module]:
    """Apply activation checkpointing to blocks of a model.

    Args:
        model: The model, in which the blocks are replaced by wrapped ones.
        blocks: Modules inside it.
        offload: Also offload the saved inputs to CPU memory; without effect on the CPU.

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
