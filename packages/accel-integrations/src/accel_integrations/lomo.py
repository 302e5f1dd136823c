"""LOMO optimizers, which update parameters while backward runs and never hold all gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from accel_state.errors import missing_library
from accel_state.libraries import is_lomo_available


def is_lomo_optimizer(optimizer: object) -> bool:
    """Whether an optimizer comes from `lomo_optim`, checked without importing it."""
    return any(base.__module__.partition(".")[0] == "lomo_optim" for base in type(optimizer).__mro__)


def lomo_backward(loss: torch.Tensor, learning_rate: float | None, optimizers: Iterable[Any]) -> None:
    """Backward and update in one go.

    Args:
        loss: 0-dim.
        learning_rate: The rate of this update.
        optimizers: The prepared plain optimizers, of which the LOMO ones are used.

    Raises:
        MissingLibraryError: When `lomo_optim` is not installed.
        ValueError: Without a learning rate, or without a LOMO optimizer.
    """
    candidates = list(optimizers)
    chosen = [optimizer for optimizer in candidates if is_lomo_optimizer(optimizer)]
    if not chosen:
        if not is_lomo_available():
            raise missing_library("lomo-optim", why="lomo_backward()")
        kinds = ", ".join(type(optimizer).__name__ for optimizer in candidates) or "none"
        raise ValueError(
            f"lomo_backward() needs a prepared Lomo or AdaLomo optimizer; those prepared are: {kinds}. Prepare one, or "
            "call backward()."
        )
    if learning_rate is None:
        raise ValueError(
            "lomo_backward() got learning_rate=None: LOMO updates parameters during the backward pass, so it needs the "
            "learning rate now. Pass it."
        )
    for optimizer in chosen:
        optimizer.fused_backward(loss, learning_rate)
