"""What stands for a model, an optimizer and a scheduler that DeepSpeed steps by itself."""

from __future__ import annotations

from typing import Any

from accel_integrations.prepared.optimizer import AcceleratedOptimizer
from accel_integrations.prepared.scheduler import AcceleratedScheduler
from accel_state.public_names import known_as
from accel_state.supervision import report_progress


@known_as("accelerate.utils.deepspeed.DeepSpeedEngineWrapper")
class DeepSpeedEngineWrapper:
    """Runs backward through a DeepSpeed engine, which takes the step too where gradients are synchronised.

    Args:
        engine (`deepspeed.DeepSpeedEngine`): What `deepspeed.initialize` returned.
    """

    engine: Any

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: Any, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Accumulate gradients, and step at the end of a window.

        Args:
            loss: The loss (0-dim tensor).
            sync_gradients (`bool`): Whether the window ends here.
            kwargs: For the engine's backward.
        """
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """The joint norm of all gradients at the last step; None before there was one."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if hasattr(norm, "item") else norm


@known_as("accelerate.utils.deepspeed.DeepSpeedOptimizerWrapper")
class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """Stands for the optimizer of a DeepSpeed engine, which steps and clears gradients by itself.

    Args:
        optimizer: The engine's optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._knows_overflow = hasattr(optimizer, "overflow")

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Nothing: the engine's step does it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing but counting: the engine stepped in backward."""
        if self.gradient_state.sync_gradients:
            report_progress()

    @property
    def step_was_skipped(self) -> bool:
        """Whether gradients were not finite at the last step."""
        return bool(self.optimizer.overflow) if self._knows_overflow else False  # type: ignore[attr-defined]


@known_as("accelerate.utils.deepspeed.DeepSpeedSchedulerWrapper")
class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """Stands for the scheduler of a DeepSpeed engine, which steps it by itself.

    Args:
        scheduler: The engine's scheduler.
        optimizers: The prepared optimizers.
    """

    has_own_file = False

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self) -> None:
        """Nothing: the engine stepped it."""
