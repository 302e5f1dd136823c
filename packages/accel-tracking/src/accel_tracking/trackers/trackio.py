"""Trackio: a local dashboard with the interface of Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from accel_state.public_names import known_as
from accel_tracking.tracker import on_main_process
from accel_tracking.trackers.service import LogsArtifacts, LogsTables, ServiceTracker, Table
from accel_tracking.values import presentable

SHOWN = frozenset({"trackio"})
RESERVED = ("project", "run", "timestamp", "step", "time", "metrics")  # its own columns

if TYPE_CHECKING:
    from trackio import Run


@known_as("accelerate.tracking.TrackioTracker")
class TrackioTracker(LogsTables, LogsArtifacts, ServiceTracker["Run"]):
    """Logs to Trackio: to a local database, or to a Hugging Face Space with `space_id`.

    When the training script constructs it, it logs from every process, for grouped runs. Further arguments of `log_table`
    go to `trackio.Table`, those of `log_artifact` (`type`, `aliases`) to `trackio.Run.log_artifact`.

    Args:
        run_name (`str`): Name of the project.
        kwargs: For `trackio.init`.
    """

    run_name: str
    init_kwargs: dict[str, Any]
    run: Run | None

    name = "trackio"
    requires_logging_directory = False
    main_process_only = False
    run_attribute = "run"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)

    @override
    def _open(self) -> Run:
        import trackio

        return trackio.init(**{"project": self.run_name, **self.init_kwargs})

    @override
    def _store_config(self, config: dict[str, Any]) -> None:
        self.tracker.config.update(config)

    @on_main_process
    @override
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values; tensors and numbers of other libraries become plain numbers.

        Args:
            values (`dict`): Whatever `trackio.Run.log` takes: numbers, strings, dictionaries, media. Other
                objects become strings. A name that Trackio reserves gets an underscore: "step" becomes "step_".
            step (`int`, *optional*): The training step.
            kwargs: For `trackio.Run.log`.
        """
        self.tracker.log(
            {_name(name): presentable(value, SHOWN) for name, value in values.items()}, step=step, **kwargs
        )

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images.

        Args:
            values (`dict`): By name, a list of images: arrays of shape (height, width, 3) with 8-bit integers, PIL
                images or paths. Several images of one name get numbers: "samples/0", "samples/1".
            step (`int`, *optional*): The training step.
            kwargs: For `trackio.Image`.
        """
        import trackio

        images = {
            f"{name}/{index}": trackio.Image(image, **kwargs)
            for name, batch in values.items()
            for index, image in enumerate(batch)
        }
        self.tracker.log(images, step=step)

    @override
    def _log_table(self, table: Table, step: int | None, kwargs: dict[str, Any]) -> None:
        import trackio

        self.tracker.log({table.name: trackio.Table(**table.arguments, **kwargs)}, step=step)

    @override
    def _log_artifact(self, path: str, name: str | None, kwargs: dict[str, Any]) -> None:
        self.tracker.log_artifact(path, name=name, **kwargs)

    @override
    def _close(self) -> None:
        self.tracker.finish()


def _name(name: Any) -> str:
    return f"{name}_" if str(name) in RESERVED or str(name).startswith("__") else str(name)
