"""The DeepSpeed plugin in use, where there are several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.enums import DistributedType

if TYPE_CHECKING:
    from accel_state.accelerator_state import AcceleratorState
    from accel_state.settings.deepspeed import DeepSpeedPlugin


def get_active_deepspeed_plugin(state: AcceleratorState) -> DeepSpeedPlugin:
    """The plugin in use.

    Args:
        state: The state of a run with DeepSpeed.

    Raises:
        ValueError: The run does not use DeepSpeed.
    """
    plugin: DeepSpeedPlugin | None = state.deepspeed_plugin
    if state.distributed_type != DistributedType.DEEPSPEED or plugin is None:
        raise ValueError(
            f"No DeepSpeed plugin is in use: the distributed_type of this run is {state.distributed_type.value!r}. "
            "Pass a DeepSpeedPlugin to Accelerator."
        )
    return plugin
