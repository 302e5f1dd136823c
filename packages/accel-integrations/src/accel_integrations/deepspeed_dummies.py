"""Placeholders for an optimizer and a scheduler that DeepSpeed's configuration defines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from accel_state.public_names import known_as


@known_as("accelerate.utils.deepspeed.DummyOptim")
class DummyOptim:
    """Placeholder for the optimizer of DeepSpeed's configuration.

    Args:
        params: The parameters, or groups of them.
        lr (`float`): Fills "auto" in the configuration.
        weight_decay (`float`): Fills "auto" in the configuration.
        kwargs: Further arguments of the optimizer.
    """

    params: Iterable[Any]
    lr: float
    weight_decay: float
    kwargs: dict[str, Any]

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


@known_as("accelerate.utils.deepspeed.DummyScheduler")
class DummyScheduler:
    """Placeholder for the scheduler of DeepSpeed's configuration.

    Args:
        optimizer: The optimizer, or its placeholder.
        total_num_steps (`int`, *optional*): Fills `auto` in the configuration.
        warmup_num_steps (`int`): Fills `auto` in the configuration.
        lr_scheduler_callable (*optional*): Makes a scheduler from an optimizer, instead.
        kwargs: Further arguments of the scheduler.
    """

    optimizer: Any
    total_num_steps: int | None
    warmup_num_steps: int
    lr_scheduler_callable: Callable[[Any], Any] | None
    kwargs: dict[str, Any]

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
