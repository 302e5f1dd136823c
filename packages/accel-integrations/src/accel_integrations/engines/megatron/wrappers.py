"""What `prepare` returns for an optimizer and a scheduler: the engine steps both when the model is called."""

from __future__ import annotations

from typing import Any

import torch

from accel_integrations.prepared.optimizer import AcceleratedOptimizer
from accel_integrations.prepared.scheduler import AcceleratedScheduler
from accel_state.public_names import known_as


@known_as("accelerate.utils.megatron_lm.MegatronLMOptimizerWrapper")
class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """An optimizer that takes its steps when a model in training is called.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the next call of the model does it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: the call of the model has taken the step."""

    def note_step(self, skipped: bool) -> None:
        """Take note of a step that the call of the model took, or `skipped`."""
        self._is_overflow = skipped

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients were inf or NaN."""
        return self._is_overflow or bool(getattr(self.optimizer, "skipped_iter", False))


@known_as("accelerate.utils.megatron_lm.MegatronLMSchedulerWrapper")
class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """A scheduler that steps when a model in training is called.

    Args:
        scheduler: The scheduler.
        optimizers: The prepared optimizers.
    """

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the call of the model has stepped the scheduler."""

    def step_after_optimizer(self) -> None:
        """Step as often as a run of one process would for the same data."""
        super().step()
