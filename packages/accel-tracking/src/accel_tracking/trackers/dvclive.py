"""DVCLive: metrics in files, which DVC and its editor extensions read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from accel_state.public_names import known_as
from accel_tracking.tracker import on_main_process
from accel_tracking.trackers.service import LogsArtifacts, ServiceTracker, numbered
from accel_tracking.values import sort_values

if TYPE_CHECKING:
    from dvclive import Live


@known_as("accelerate.tracking.DVCLiveTracker")
class DVCLiveTracker(LogsArtifacts, ServiceTracker["Live"]):
    """Logs with DVCLive.

    Further arguments of `log_artifact` go to `Live.log_artifact`; outside a DVC repository, that only warns.

    Args:
        run_name (`str`, *optional*): Not used; DVC names experiments.
        live (`dvclive.Live`, *optional*): An existing one, instead of a new one.
        kwargs: For `dvclive.Live`.
    """

    init_kwargs: dict[str, Any]
    live: Live | None

    name = "dvclive"
    requires_logging_directory = False
    run_attribute = "live"

    def __init__(self, run_name: str | None = None, live: Live | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.live = live

    @override
    def _open(self) -> Live:
        from dvclive import Live

        return Live(**self.init_kwargs) if self.live is None else self.live

    @override
    def _store_config(self, config: dict[str, Any]) -> None:
        self.tracker.log_params(config)

    @on_main_process
    @override
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and strings as metrics, and advance to the next step.

        Args:
            values (`dict`): Values by name; dictionaries of numbers become `group/name`.
            step (`int`, *optional*): The training step; one more than the last one if left out.
            kwargs: For `Live.log_metric`.
        """
        if step is not None:
            self.tracker.step = step
        logged = sort_values(values)
        for name, value in {**logged.flat(), **logged.texts}.items():
            self.tracker.log_metric(name, value, **kwargs)
        self.tracker.next_step()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images.

        Args:
            values (`dict`): By name, an array of shape (height, width, channels), a PIL image, a figure, a path, or a
                list of these. Names without a file ending get ".png".
            step (`int`, *optional*): The training step.
            kwargs: For `Live.log_image`.
        """
        if step is not None:
            self.tracker.step = step
        for name, value in values.items():
            stem, ending = os.path.splitext(str(name))
            for label, image in numbered(stem, value):
                self.tracker.log_image(f"{label}{ending or '.png'}", image, **kwargs)

    @override
    def _log_artifact(self, path: str, name: str | None, kwargs: dict[str, Any]) -> None:
        self.tracker.log_artifact(path, name=name, **kwargs)

    @override
    def _close(self) -> None:
        self.tracker.end()
