"""Which of several DeepSpeed plugins is in use."""

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
        ValueError: The run is without DeepSpeed.
    """
    plugin: DeepSpeedPlugin | None = state.deepspeed_plugin
    if state.distributed_type != DistributedType.DEEPSPEED or plugin is None:
        raise ValueError(
            f"There is no DeepSpeed plugin in use: the run's distributed_type is {state.distributed_type.value!r}. Pass "
            "a DeepSpeedPlugin to Accelerator."
        )
    return plugin
