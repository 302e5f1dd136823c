"""The trackers of one run, started, fed and finished together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from accel_state.processes import PartialState
from accel_tracking.registry import LOGGER_TYPE_TO_CLASS
from accel_tracking.tracker import GeneralTracker


class TrackerSet:
    """Calls a run's trackers on the main process; elsewhere every method does nothing.

    Args:
        wanted: What `filter_trackers` returned.
        logging_dir (`str` or path, *optional*): Folder for trackers that need one.
    """

    def __init__(
        self, wanted: Sequence[GeneralTracker | str], logging_dir: str | os.PathLike[str] | None = None
    ) -> None:
        self.wanted = list(wanted)
        self.logging_dir = logging_dir
        self.active: list[GeneralTracker] = []
        """The started trackers; empty on processes other than the main one."""

    def start(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start every wanted tracker and give it the run's settings.

        Args:
            project_name (`str`): Name of the run.
            config (`dict`, *optional*): Its settings.
            init_kwargs (`dict`, *optional*): Per tracker name, further constructor arguments.
        """
        if not PartialState().is_main_process:
            return
        for entry in self.wanted:
            tracker = entry
            if isinstance(tracker, str):
                tracker = self._make(tracker, project_name, (init_kwargs or {}).get(tracker, {}))
            tracker.start()
            if config is not None:
                tracker.store_init_configuration(config)
            if tracker not in self.active:
                self.active.append(tracker)

    def _make(self, name: str, project_name: str, arguments: Mapping[str, Any]) -> GeneralTracker:
        tracker_class: Any = LOGGER_TYPE_TO_CLASS[name]  # its constructor is the subclass's own
        if tracker_class.requires_logging_directory:
            return tracker_class(project_name, self.logging_dir, **arguments)
        return tracker_class(project_name, **arguments)

    def get(self, name: str, unwrap: bool = False) -> Any:
        """A started tracker by name.

        Returns:
            The tracker, or with `unwrap` the object of the library behind it. On processes other than the main one,
            and before trackers are started, a tracker that ignores every call.

        Raises:
            ValueError: On the main process, when trackers were started but none of this name.
        """
        if self.active:
            for tracker in self.active:
                if tracker.name == name:
                    return tracker.tracker if unwrap else tracker
            names = ", ".join(repr(tracker.name) for tracker in self.active)
            raise ValueError(f"There is no tracker {name!r} in this run: choose from {names}.")
        return GeneralTracker(_blank=True)

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Hand numbers to every started tracker.

        Args:
            values (`dict`): Values by name.
            step (`int`, *optional*): The training step they belong to.
            log_kwargs (`dict`, *optional*): Per tracker name, further arguments of its `log`.
        """
        for tracker in self.active:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def finish(self) -> None:
        """Finish all started trackers, the later ones too when one fails."""
        with ExitStack() as endings:
            for tracker in reversed(self.active):
                endings.callback(tracker.finish)
