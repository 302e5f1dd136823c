"""Aim: runs in a repository on disk."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from accel_state.public_names import known_as
from accel_tracking.tracker import on_main_process
from accel_tracking.trackers.service import ServiceTracker
from accel_tracking.values import non_finite, sort_values

if TYPE_CHECKING:
    from aim import Run


@known_as("accelerate.tracking.AimTracker")
class AimTracker(ServiceTracker["Run"]):
    """Logs to an Aim repository, read by `aim up`.

    Args:
        run_name (`str`): Name of the run.
        logging_dir (`str` or path): Folder of the repository.
        kwargs: For `aim.Run`.
    """

    run_name: str
    init_kwargs: dict[str, Any]
    aim_repo_path: str | os.PathLike[str] | None
    writer: Run | None

    name = "aim"
    requires_logging_directory = True
    run_attribute = "writer"

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    @override
    def _open(self) -> Run:
        from aim import Run

        repository = os.fspath(self.aim_repo_path) if self.aim_repo_path is not None else None
        if repository is not None and "://" not in repository:
            os.makedirs(repository, exist_ok=True)
        run = Run(**{"repo": repository, **self.init_kwargs})
        run.name = self.run_name
        return run

    @override
    def _store_config(self, config: dict[str, Any]) -> None:
        self.tracker["hparams"] = config

    @on_main_process
    @override
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Track numbers and strings; dictionaries of numbers become `group/name`.

        Args:
            values (`dict`): Values by name. NaN and infinities are left out of the curves, which cannot hold them,
                and stored as `aim.Text` under `name (not finite)`.
            step (`int`, *optional*): The training step.
            kwargs: For `aim.Run.track`.
        """
        from aim import Text

        logged = sort_values(values)
        for name, value in logged.flat().items():
            if isinstance(value, float) and not math.isfinite(value):
                self.tracker.track(Text(non_finite(value)), name=f"{name} (not finite)", step=step, **kwargs)
            else:
                self.tracker.track(value, name=name, step=step, **kwargs)
        for name, text in logged.texts.items():
            self.tracker.track(Text(text), name=name, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Track images.

        Args:
            values (`dict`): By name, an image, a pair of image and caption, or a list of either; images are what
                `aim.Image` takes: arrays, tensors, PIL images, paths.
            step (`int`, *optional*): The training step.
            kwargs (`dict`, *optional*): Further arguments: "aim_image" for `aim.Image`, "track" for `aim.Run.track`.
        """
        from aim import Image

        of_image = (kwargs or {}).get("aim_image", {})
        of_track = (kwargs or {}).get("track", {})
        for name, value in values.items():
            images = [
                Image(image[0], caption=image[1], **of_image) if isinstance(image, tuple) else Image(image, **of_image)
                for image in (value if isinstance(value, list) else [value])
            ]
            self.tracker.track(images if isinstance(value, list) else images[0], name=str(name), step=step, **of_track)

    @override
    def _close(self) -> None:
        self.tracker.close()
