"""What happens when a gradient is not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from accel_state.settings.handler import KwargsHandler
from accel_state.settings.option import at_least, option, resolve_options


@dataclass
class FiniteGradientsKwargs(KwargsHandler):
    """What happens when a gradient is inf or NaN where an optimizer steps. All ranks do the same.

    Args:
        action (`"stop"`, `"skip"` or `"warn"`, *optional*): `"stop"` raises `FloatingPointError` on all ranks, before the step.
            `"skip"` leaves the optimizer's step out on all ranks, with a warning; `optimizer_step_was_skipped` is True, and
            schedulers do not step. `"warn"` warns and steps. When None, the environment variable `ACCELERATE_FINITE_GRADIENTS`,
            or else `"stop"`.
        patience (`int`, *optional*): With `"skip"` or `"warn"`: the error of `"stop"` is raised when an optimizer has had so many
            such steps in a row. No limit when None.

    Raises:
        ValueError: The action is not known, the patience is below 1, or there is one with `"stop"`.

    Example:
        ```python
        accelerator = Accelerator(kwargs_handlers=[FiniteGradientsKwargs(action="skip", patience=20)])
        ```
    """

    slot = "finite_gradients"

    action: Literal["stop", "skip", "warn"] | None = option(
        None, choices=("stop", "skip", "warn"), env="ACCELERATE_FINITE_GRADIENTS", fallback="stop"
    )
    patience: int | None = option(None, kind=at_least(1))

    def __post_init__(self) -> None:
        resolve_options(self)
        if self.patience is not None and self.action == "stop":
            raise ValueError(
                f"FiniteGradientsKwargs.patience={self.patience!r} has no effect with action='stop', which raises at once. Leave it "
                "out, or choose 'skip' or 'warn'."
            )
