"""DVCLive: files that DVC and its editors read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from accel_state.public_names import known_as
from accel_tracking.tracker import GeneralTracker, on_main_process
from accel_tracking.values import plain_settings, sort_values

if TYPE_CHECKING:
    from dvclive import Live


@known_as("accelerate.tracking.DVCLiveTracker")
class DVCLiveTracker(GeneralTracker):
    """Logs with DVCLive.

    Args:
        run_name (`str`, *optional*): Not used; DVC names experiments.
        live (`dvclive.Live`, *optional*): One made before, instead of one of its own.
        kwargs: For `dvclive.Live`.
    """

    live: Live | None
    init_kwargs: dict[str, Any]

    name = "dvclive"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, live: Live | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.live = live
        self.init_kwargs = kwargs

    @property
    def tracker(self) -> Live:
        """The `dvclive.Live`."""
        assert self.live is not None, "asked for before start()"
        return self.live

    @on_main_process
    def start(self) -> None:
        """Open the folder of the run."""
        from dvclive import Live

        if self.live is None:
            self.live = Live(**self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings as parameters.

        Args:
            values (`dict`): The settings.
        """
        self.tracker.log_params(plain_settings(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and texts as metrics, and go on to the next step.

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
        for name, given in values.items():
            stem, ending = os.path.splitext(str(name))
            images = given if isinstance(given, (list, tuple)) else [given]
            for place, image in enumerate(images):
                label = stem if len(images) == 1 else f"{stem}_{place}"
                self.tracker.log_image(f"{label}{ending or '.png'}", image, **kwargs)

    @on_main_process
    def log_artifact(
        self, local_path: str | os.PathLike[str], artifact_path: str | None = None, **kwargs: Any
    ) -> None:
        """Have DVC keep a file or folder; outside a DVC repository, the library does nothing but warn.

        Args:
            local_path (`str` or path): The file or folder.
            artifact_path (`str`, *optional*): Name of the artifact.
            kwargs: For `Live.log_artifact`.
        """
        self.tracker.log_artifact(os.fspath(local_path), name=artifact_path, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Write the summary and, inside a DVC repository, save the experiment."""
        if self.live is not None:
            self.live.end()
