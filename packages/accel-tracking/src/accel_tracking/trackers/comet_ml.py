"""Comet."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from accel_state.public_names import known_as
from accel_tracking.tracker import on_main_process
from accel_tracking.trackers.service import LogsArtifacts, LogsTables, ServiceTracker, Table
from accel_tracking.values import sort_values

if TYPE_CHECKING:
    from comet_ml import CometExperiment

TABLE_FORMATS = (".csv", ".tsv", ".json")


@known_as("accelerate.tracking.CometMLTracker")
class CometMLTracker(LogsTables, LogsArtifacts, ServiceTracker["CometExperiment"]):
    """Logs to Comet; without an account or network with `init_kwargs={"comet_ml": {"online": False}}`.

    Further arguments of `log_table` go to Comet's `log_table`, whose names without a file ending get ".csv"; those of
    `log_artifact` to `log_asset`, or to `log_asset_folder` for a folder.

    Args:
        run_name (`str`): Name of the project.
        kwargs: For `comet_ml.start`.
    """

    run_name: str
    init_kwargs: dict[str, Any]
    writer: CometExperiment | None

    name = "comet_ml"
    requires_logging_directory = False
    run_attribute = "writer"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)

    @override
    def _open(self) -> CometExperiment:
        import comet_ml

        named = {} if "project" in self.init_kwargs else {"project_name": self.run_name}
        return comet_ml.start(**{**named, **self.init_kwargs})

    @override
    def _store_config(self, config: dict[str, Any]) -> None:
        self.tracker.log_parameters(config)

    @on_main_process
    @override
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, dictionaries as groups of metrics, strings as other values.

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

    @override
    def _log_table(self, table: Table, step: int | None, kwargs: dict[str, Any]) -> None:
        if step is not None:
            self.tracker.set_step(step)
        file_name = table.name if os.path.splitext(table.name)[1] in TABLE_FORMATS else f"{table.name}.csv"
        if table.dataframe is not None:
            self.tracker.log_table(file_name, tabular_data=table.dataframe, **kwargs)
        else:
            headers = {"headers": table.columns} if table.columns else {}
            self.tracker.log_table(file_name, tabular_data=table.data or [], **headers, **kwargs)

    @override
    def _log_artifact(self, path: str, name: str | None, kwargs: dict[str, Any]) -> None:
        if os.path.isdir(path):
            self.tracker.log_asset_folder(path, log_file_name=True, recursive=True, **kwargs)
        else:
            self.tracker.log_asset(path, file_name=name, **kwargs)

    @override
    def _close(self) -> None:
        self.tracker.end()
