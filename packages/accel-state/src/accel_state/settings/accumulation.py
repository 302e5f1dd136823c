"""Settings of gradient accumulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from accel_state.guessing import guess_arguments
from accel_state.public_names import known_as
from accel_state.settings.handlers import KwargsHandler
from accel_state.settings.option import BOOLEAN, at_least, option, resolve_options


@known_as("accelerate.utils.dataclasses.GradientAccumulationPlugin")
@guess_arguments
@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How `Accelerator.accumulate` accumulates gradients over micro-batches.

    Args:
        num_steps (`int`): The number of micro-batches of an accumulation window, at least 1.
        adjust_scheduler (`bool`): Without effect, as in accelerate 1.15: prepared learning-rate schedulers always step
            when the optimizer does, so their lengths are counted in optimizer steps.
        sync_with_dataloader (`bool`): Whether the end of a data loader ends the window, however short it is.
        sync_each_batch (`bool`): Reduce gradients in every micro-batch: more communication, less memory (FSDP).
        average_over (`"steps"`, `"window"` or `"weights"`): What a window's gradient is divided by. `"steps"`: each
            loss by `num_steps`, also in a shorter last window. `"window"`: by the number of batches the window really
            had. `"weights"`: by the sum of the weights given to `backward(loss, weight=...)` over all batches and
            processes, where each loss is a mean over `weight` items (for instance tokens).

    Example:
        ```python
        plugin = GradientAccumulationPlugin(num_steps=4, average_over="window")
        accelerator = Accelerator(gradient_accumulation_plugin=plugin)
        ```
    """

    num_steps: int | None = option(
        None,
        kind=at_least(1),
        help="Gradient accumulation steps.",
    )
    adjust_scheduler: bool = option(True, kind=BOOLEAN)
    sync_with_dataloader: bool = option(True, kind=BOOLEAN)
    sync_each_batch: bool = option(False, kind=BOOLEAN)
    average_over: Literal["steps", "window", "weights"] = option("steps", choices=("steps", "window", "weights"))

    def __post_init__(self) -> None:
        resolve_options(self)
