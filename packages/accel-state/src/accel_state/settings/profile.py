"""What `Accelerator.profile` records."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from accel_state.guessing import guess_arguments
from accel_state.public_names import known_as
from accel_state.settings.handler import KwargsHandler
from accel_state.settings.option import (
    BOOLEAN,
    FUNCTION,
    MAPPING,
    PATH,
    Kind,
    one_of,
    option,
    resolve_options,
    wrong_value,
)

if TYPE_CHECKING:
    import torch

ProfilerActivity = Literal["cpu", "xpu", "mtia", "cuda", "hpu"]
ACTIVITY = one_of("cpu", "xpu", "mtia", "cuda", "hpu")
ACTIVITIES = Kind(
    f"a list with any {ACTIVITY.expected}",
    lambda text: text.split(","),
    lambda value: isinstance(value, (list, tuple)),
)


@known_as("accelerate.utils.dataclasses.ProfileKwargs")
@guess_arguments
@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of `torch.profiler.profile`, as plain values.

    Args:
        activities (list of `str`, *optional*): Any of "cpu", "cuda", "xpu", "mtia", "hpu"; when None, all that this
            torch can record.
        schedule_option (`dict`, *optional*): Arguments of `torch.profiler.schedule`, in steps: `wait`, `warmup` and
            `active` are needed, `repeat`, `skip_first` and `skip_first_wait` possible. Records all when None.
        on_trace_ready (function, *optional*): Called with the profiler each time a recording is complete.
        record_shapes (`bool`): Record the shapes of operators' inputs.
        profile_memory (`bool`): Record allocations and releases of memory.
        with_stack (`bool`): Record file and line of each operator.
        with_flops (`bool`): Estimate floating point operations.
        with_modules (`bool`): Record the modules that call operators.
        output_trace_dir (`str`, *optional*): Folder for one Chrome trace per process.

    Example:
        ```python
        handler = ProfileKwargs(activities=["cpu"], schedule_option={"wait": 1, "warmup": 1, "active": 2})
        with accelerator.profile(handler) as profiler:
            for batch in loader:
                step(batch)
                profiler.step()
        ```
    """

    slot = "profile"

    activities: list[ProfilerActivity] | None = option(None, kind=ACTIVITIES)
    schedule_option: dict[str, int] | None = option(None, kind=MAPPING)
    on_trace_ready: Callable[..., Any] | None = option(None, kind=FUNCTION)
    record_shapes: bool = option(False, kind=BOOLEAN)
    profile_memory: bool = option(False, kind=BOOLEAN)
    with_stack: bool = option(False, kind=BOOLEAN)
    with_flops: bool = option(False, kind=BOOLEAN)
    with_modules: bool = option(False, kind=BOOLEAN)
    output_trace_dir: str | os.PathLike[str] | None = option(None, kind=PATH)

    def __post_init__(self) -> None:
        resolve_options(self)
        for activity in self.activities or ():
            ACTIVITY.read("ProfileKwargs.activities entry", activity)

    def _get_profiler_activity(self, activity: ProfilerActivity) -> torch.profiler.ProfilerActivity:
        """Torch's name for an activity; torch warns of one that it cannot record on this machine, and goes on without it.

        Raises:
            ValueError: For an unknown one.
        """
        from torch.profiler import ProfilerActivity

        member: torch.profiler.ProfilerActivity = getattr(
            ProfilerActivity, ACTIVITY.read("ProfileKwargs.activities entry", activity).upper()
        )
        return member

    def build(self) -> torch.profiler.profile:
        """Create the profiler; it starts when entered as a context.

        Raises:
            ValueError: For an unknown activity, or a schedule that torch does not know.
        """
        import torch

        activities = None
        if self.activities is not None:
            activities = [self._get_profiler_activity(activity) for activity in self.activities]
        return torch.profiler.profile(
            activities=activities,
            schedule=self._make_schedule(),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    def _make_schedule(self) -> Callable[[int], Any] | None:
        from torch.profiler import schedule

        if self.schedule_option is None:
            return None
        parameters = inspect.signature(schedule).parameters
        for name in self.schedule_option:
            if name not in parameters:
                known = ", ".join(map(repr, parameters))
                raise wrong_value("ProfileKwargs.schedule_option key", name, f"one of {known}", parameters)
        missing = [
            name for name, row in parameters.items() if row.default is row.empty and name not in self.schedule_option
        ]
        if missing:
            key = "ProfileKwargs.schedule_option"
            raise wrong_value(key, self.schedule_option, f"a dictionary that also has {', '.join(map(repr, missing))}")
        return schedule(**self.schedule_option)
