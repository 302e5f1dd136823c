"""Gradients that are exchanged although the forward ran in a block without exchange.

Functions rather than methods of engines, because `Accelerator.trigger_sync_in_backward` is static.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from accel_integrations.engines import ddp


def sync_next_backward(model: nn.Module) -> AbstractContextManager[None]:
    """A block in which backward exchanges the gradients of `model`, whatever its forward was told.

    Models whose gradients nobody shares have nothing to exchange.

    Args:
        model: As `prepare` returned it.
    """
    if hasattr(model, "set_requires_gradient_sync"):
        return _of_distributed_parameters(model)
    inner = getattr(model, "_orig_mod", model)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever has wrapped a model in it has imported it
    if fsdp is not None and isinstance(inner, fsdp.FullyShardedDataParallel):
        return _of_flat_parameters(fsdp.FullyShardedDataParallel.fsdp_modules(inner))
    return ddp.sync_next_backward(model)


@contextmanager
def _of_distributed_parameters(model: Any) -> Iterator[None]:
    """As `fully_shard` made them; afterwards they are exchanged anyway, unless a block says otherwise again."""
    model.set_requires_gradient_sync(True)
    yield


@contextmanager
def _of_flat_parameters(modules: list[Any]) -> Iterator[None]:
    before = [module._sync_gradients for module in modules]
    for module in modules:
        module._sync_gradients = True
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module._sync_gradients = value
