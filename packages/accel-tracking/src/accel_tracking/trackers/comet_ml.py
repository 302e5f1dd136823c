"""Comet."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from accel_state.public_names import known_as
from accel_tracking.tracker import GeneralTracker, on_main_process
from accel_tracking.values import plain_settings, sort_values

if TYPE_CHECKING:
    from comet_ml import CometExperiment


@known_as("accelerate.tracking.CometMLTracker")
class CometMLTracker(GeneralTracker):
    """Logs to Comet; without an account or network with `init_kwargs={"comet_ml": {"online": False}}`.

    Args:
        run_name (`str`): Name of the project.
        kwargs: For `comet_ml.start`.
    """

    run_name: str
    init_kwargs: dict[str, Any]
    writer: CometExperiment | None

    name = "comet_ml"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.writer = None

    @property
    def tracker(self) -> CometExperiment:
        """Comet's experiment object."""
        assert self.writer is not None, "asked for before start()"
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Begin the experiment."""
        import comet_ml

        named = {} if "project" in self.init_kwargs else {"project_name": self.run_name}
        self.writer = comet_ml.start(**{**named, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings as parameters.

        Args:
            values (`dict`): The settings.
        """
        self.tracker.log_parameters(plain_settings(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, dictionaries as groups of metrics, texts as other values.

        Args:
            values (`dict`): Values by name.
            step (`int`, *optional*): The training step.
            kwargs: For `log_metric` and `log_metrics`.
        """
        if step is not None:
            self.tracker.set_step(step)
        logged = sort_values(values)
        for name, value in logged.numbers.items():
            self.tracker.log_metric(name, value, step=step, **kwargs)
        for name, group in logged.groups.items():
            self.tracker.log_metrics({f"{name}/{inner}": value for inner, value in group.items()}, step=step, **kwargs)
        for name, text in logged.texts.items():
            self.tracker.log_other(name, text)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images.

        Args:
            values (`dict`): By name, a list of images: arrays of shape (height, width, channels), PIL images, paths.
            step (`int`, *optional*): The training step.
            kwargs: For `log_image`, such as `image_channels="first"`.
        """
        for name, images in values.items():
            for image in images:
                self.tracker.log_image(image, name=str(name), step=step, **kwargs)

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
            table_name (`str`): Name of the table; ".csv" is added when it names no format.
            columns (list of `str`, *optional*): Names of the columns.
            data (list of lists, *optional*): The rows.
            dataframe (`pandas.DataFrame`, *optional*): Both at once; then `columns` and `data` are not used.
            step (`int`, *optional*): The training step.
            kwargs: For `log_table`.
        """
        if step is not None:
            self.tracker.set_step(step)
        file_name = table_name if os.path.splitext(table_name)[1] in (".csv", ".tsv", ".json") else f"{table_name}.csv"
        if dataframe is not None:
            self.tracker.log_table(file_name, tabular_data=dataframe, **kwargs)
        else:
            headers = {"headers": columns} if columns else {}
            self.tracker.log_table(file_name, tabular_data=data or [], **headers, **kwargs)

    @on_main_process
    def log_artifact(
        self, local_path: str | os.PathLike[str], artifact_path: str | None = None, **kwargs: Any
    ) -> None:
        """Keep a file or a folder's files with the experiment, as assets.

        Args:
            local_path (`str` or path): The file or folder.
            artifact_path (`str`, *optional*): Name of the asset; that of the file if left out.
            kwargs: For `log_asset` or `log_asset_folder`.
        """
        if os.path.isdir(local_path):
            self.tracker.log_asset_folder(os.fspath(local_path), log_file_name=True, recursive=True, **kwargs)
        else:
            self.tracker.log_asset(os.fspath(local_path), file_name=artifact_path, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Send what is left, or write the archive of an offline experiment."""
        if self.writer is not None:
            self.writer.end()
