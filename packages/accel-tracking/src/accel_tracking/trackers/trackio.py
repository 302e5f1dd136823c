"""Trackio: a local dashboard with the interface of Weights & Biases."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from accel_state.public_names import known_as
from accel_tracking.tracker import GeneralTracker, on_main_process
from accel_tracking.values import plain_settings, presentable

SHOWN = frozenset({"trackio"})
RESERVED = ("project", "run", "timestamp", "step", "time", "metrics")  # names of its own columns

if TYPE_CHECKING:
    from trackio import Run


@known_as("accelerate.tracking.TrackioTracker")
class TrackioTracker(GeneralTracker):
    """Logs to Trackio: to a file of this machine, or to a Hugging Face Space with `space_id`.

    Made by hand, it works in every process, for runs in groups.

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

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run = None

    @property
    def tracker(self) -> Run:
        """The `trackio.Run`."""
        assert self.run is not None, "asked for before start()"
        return self.run

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        import trackio

        self.run = trackio.init(**{"project": self.run_name, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Add settings to those of the run.

        Args:
            values (`dict`): The settings.
        """
        self.tracker.config.update(plain_settings(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values; tensors and numbers of other libraries become plain numbers.

        Args:
            values (`dict`): Whatever `trackio.Run.log` takes: numbers, texts, dictionaries, media. Other objects
                become text. A name that Trackio has a use of its own for gets an underscore: "step" becomes "step_".
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
            f"{name}/{place}": trackio.Image(image, **kwargs)
            for name, batch in values.items()
            for place, image in enumerate(batch)
        }
        self.tracker.log(images, step=step)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, given as columns and rows or as a data frame.

        Args:
            table_name (`str`): Name of the table.
            columns (list of `str`, *optional*): Names of the columns.
            data (list of lists, *optional*): The rows.
            dataframe (`pandas.DataFrame`, *optional*): Both at once; then `columns` and `data` are not used.
            step (`int`, *optional*): The training step.
            kwargs: For `trackio.Table`.
        """
        import trackio

        given = {"columns": columns, "data": data} if dataframe is None else {"dataframe": dataframe}
        self.tracker.log({table_name: trackio.Table(**given, **kwargs)}, step=step)

    @on_main_process
    def log_artifact(
        self, local_path: str | os.PathLike[str], artifact_path: str | None = None, **kwargs: Any
    ) -> None:
        """Keep a file or folder with the run.

        Args:
            local_path (`str` or path): The file or folder.
            artifact_path (`str`, *optional*): Name of the artifact; chosen by the library if left out.
            kwargs: For `trackio.Run.log_artifact`, such as `type` and `aliases`.
        """
        self.tracker.log_artifact(os.fspath(local_path), name=artifact_path, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        if self.run is not None:
            self.run.finish()


def _name(name: Any) -> str:
    return f"{name}_" if str(name) in RESERVED or str(name).startswith("__") else str(name)
