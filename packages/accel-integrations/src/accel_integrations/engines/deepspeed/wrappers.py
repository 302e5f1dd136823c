"""Wrappers of the engine, optimizer and scheduler of DeepSpeed, which steps them itself."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from accel_integrations.prepared.optimizer import AcceleratedOptimizer
from accel_integrations.prepared.scheduler import AcceleratedScheduler
from accel_state.public_names import known_as
from accel_state.supervision import report_progress
from accel_state.warning import warn_user


@known_as("accelerate.utils.deepspeed.DeepSpeedEngineWrapper")
class DeepSpeedEngineWrapper:
    """Runs backward through a DeepSpeed engine, and takes the optimizer step where gradients are synchronized.

    Args:
        engine (`deepspeed.DeepSpeedEngine`): What `deepspeed.initialize` returned.
    """

    engine: Any

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: Any, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Accumulate gradients, and take the optimizer step on sync steps.

        Args:
            loss: The loss (0-dim tensor).
            sync_gradients (`bool`): Whether this is a sync step, the last of an accumulation window.
            kwargs: For the engine's backward.
        """
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """The total gradient norm at the last step; None before the first step."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if hasattr(norm, "item") else norm


@known_as("accelerate.utils.deepspeed.DeepSpeedOptimizerWrapper")
class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """Wraps the optimizer of a DeepSpeed engine, which steps it and clears gradients itself.

    Args:
        optimizer: The engine's optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._knows_overflow = hasattr(optimizer, "overflow")

    @override
    def _switch(self, mode: str) -> None:
        """Warns where DeepSpeed keeps the weights that a schedule-free optimizer would switch."""
        inner = getattr(self.optimizer, "optimizer", None)
        if callable(getattr(self.optimizer, mode, None)) or not callable(getattr(inner, mode, None)):
            super()._switch(mode)
            return
        warn_user(
            f"optimizer.{mode}() has no effect: {type(self.optimizer).__name__} keeps the weights that "
            f"{type(inner).__name__} would switch, so that evaluation would run on training weights. Train with DDP or FSDP, or "
            "with another optimizer."
        )

    @override
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Does nothing: the engine's step clears gradients."""

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing but report progress: the engine has taken the step in backward."""
        if self.gradient_state.sync_gradients:
            report_progress()

    @property
    @override
    def step_was_skipped(self) -> bool:
        return bool(self.optimizer.overflow) if self._knows_overflow else False  # type: ignore[attr-defined]


@known_as("accelerate.utils.deepspeed.DeepSpeedSchedulerWrapper")
class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """Wraps the scheduler of a DeepSpeed engine, which steps it itself.

    Args:
        scheduler: The engine's scheduler.
        optimizers: The prepared optimizers.
    """

    has_own_file = False

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    @override
    def step(self) -> None:
        """Does nothing: the engine has stepped the scheduler."""
