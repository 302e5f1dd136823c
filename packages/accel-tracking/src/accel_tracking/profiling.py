"""Profiling with `torch.profiler`, one trace per rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from accel_ops.files.filenames import PROFILE_PATTERN_NAME
from accel_state.processes import PartialState
from accel_state.settings.profile import ProfileKwargs
from accel_state.warning import warn_user

if TYPE_CHECKING:
    import torch


@contextmanager
def record_profile(settings: ProfileKwargs | None = None, summary: bool = False) -> Iterator[torch.profiler.profile]:
    """Profile a `with` block and, unless it raises, write `profile_<rank>.json` if the settings name a folder.

    Args:
        settings (`ProfileKwargs`, *optional*): What to record, and the folder of the Chrome traces.
        summary (`bool`): Whether the main process then prints a summary of a few lines to standard error.

    Yields:
        The running `torch.profiler.profile`.

    Example:
        ```python
        with record_profile(ProfileKwargs(activities=["cpu"], output_trace_dir="traces")) as profiler:
            step()
        ```
    """
    settings = settings or ProfileKwargs()
    with settings.build() as profiler:
        yield profiler
    state = PartialState()
    if profiler.profiler is None:  # torch's own check is an assertion
        if settings.output_trace_dir is not None:
            warn_user(
                f"Nothing was recorded for {settings.output_trace_dir}: schedule_option={settings.schedule_option!r} "
                "had not reached its first active step. Call profiler.step() more often, or shorten wait and warmup."
            )
    elif settings.output_trace_dir is not None:
        folder = Path(settings.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / PROFILE_PATTERN_NAME.format(suffix=state.process_index)))
    if summary and state.is_main_process:
        _print_summary(profiler)
    if settings.output_trace_dir is not None:
        state.wait_for_everyone()  # all traces are written before any rank continues


def _print_summary(profiler: torch.profiler.profile) -> None:
    from accel_tracking.profiling_summary import summarize

    summary = summarize(profiler)
    if summary is not None:
        sys.stderr.write(f"{summary}\n")
