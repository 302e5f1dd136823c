"""MLflow."""

from __future__ import annotations

import json
import os
import re
from itertools import islice
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from accel_state.environment import str_to_bool
from accel_state.public_names import known_as
from accel_state.warning import warn_user
from accel_tracking.tracker import on_main_process
from accel_tracking.trackers.service import LogsTables, ServiceTracker, Table
from accel_tracking.values import sort_values

if TYPE_CHECKING:
    from mlflow import ActiveRun

FORBIDDEN = re.compile(r"[^\w\-. /]")  # in names of metrics and parameters
FORBIDDEN_IN_PATHS = re.compile(r"^/+|(?<=/)/+|(^|(?<=/))\.+(?=/|$)")  # names are paths, too


@known_as("accelerate.tracking.MLflowTracker")
class MLflowTracker(LogsTables, ServiceTracker["ActiveRun"]):
    """Logs to MLflow: to `MLFLOW_TRACKING_URI`, which may be a file such as `sqlite:///runs.db`.

    Four environment variables take precedence over arguments: `MLFLOW_EXPERIMENT_NAME`, `MLFLOW_RUN_ID`, `MLFLOW_TAGS`
    (JSON, added to the argument's) and `MLFLOW_NESTED_RUN`. Nested hyperparameters are stored as strings; values too
    long for MLflow are left out, with a warning. Further arguments of `log_table` go to `mlflow.log_table`; a table is
    a JSON artifact, and the step becomes part of its file's name.

    Args:
        experiment_name (`str`, *optional*): Name of the experiment; created if it does not exist.
        logging_dir (`str` or path, *optional*): Folder of the artifacts of a new experiment.
        run_id (`str`, *optional*): A run to resume, instead of a new one.
        tags (`dict` or `str`, *optional*): Tags of the run, as a dictionary or JSON.
        nested_run (`bool` or `str`, *optional*): Whether the run is nested in the active one.
        run_name (`str`, *optional*): Name of the run; chosen by the library if left out.
        description (`str`, *optional*): Notes on the run.
    """

    experiment_name: str | None
    logging_dir: str | os.PathLike[str] | None
    run_id: str | None
    tags: dict[str, Any]
    nested_run: bool
    run_name: str | None
    description: str | None
    active_run: ActiveRun | None

    name = "mlflow"
    requires_logging_directory = False
    run_attribute = "active_run"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | str | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name)
        environment = os.environ
        nested = environment.get("MLFLOW_NESTED_RUN", nested_run)
        self.experiment_name = environment.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id = environment.get("MLFLOW_RUN_ID", run_id)
        self.tags = _tags(tags, "tags") | _tags(environment.get("MLFLOW_TAGS"), "MLFLOW_TAGS")
        self.nested_run = bool(str_to_bool(nested)) if isinstance(nested, str) else bool(nested)
        self.description = description

    @property
    def _id(self) -> str:
        return str(self.tracker.info.run_id)

    @override
    def _open(self) -> ActiveRun:
        import mlflow

        return mlflow.start_run(
            run_id=self.run_id,
            experiment_id=self._experiment_id(),
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags or None,
            description=self.description,
        )

    def _experiment_id(self) -> str | None:
        import mlflow

        if self.experiment_name is None:
            return None
        experiment = mlflow.get_experiment_by_name(self.experiment_name)
        if experiment is not None:
            return str(experiment.experiment_id)
        folder = os.fspath(self.logging_dir) if self.logging_dir is not None else None
        return str(mlflow.create_experiment(self.experiment_name, artifact_location=folder))

    @override
    def _store_config(self, config: dict[str, Any]) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

        parameters = {_name(name): str(value) for name, value in config.items()}
        too_long = [name for name, value in parameters.items() if len(value) > MAX_PARAM_VAL_LENGTH]
        if too_long:
            warn_user(
                f"MLflow parameters {', '.join(map(repr, too_long))} are not logged: their values have more than "
                f"{MAX_PARAM_VAL_LENGTH} characters."
            )
        params = iter([Param(name, value) for name, value in parameters.items() if name not in too_long])
        while batch := list(islice(params, MAX_PARAMS_TAGS_PER_BATCH)):
            MlflowClient().log_batch(self._id, params=batch)

    @on_main_process
    @override
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers; MLflow's curves hold nothing else, so strings become tags of the run.

        Args:
            values (`dict`): Values by name. In names, characters that MLflow forbids become "_". NaN is kept;
                infinities become the largest number, as its database has none.
            step (`int`, *optional*): The training step.
            kwargs: For `mlflow.log_metrics`.
        """
        import mlflow

        logged = sort_values(values)
        metrics = {_name(name): float(value) for name, value in logged.flat().items()}
        if metrics:
            mlflow.log_metrics(metrics, step=step, **{"run_id": self._id, **kwargs})
        if logged.texts:
            client = mlflow.MlflowClient()
            for name, text in logged.texts.items():
                client.set_tag(self._id, _name(name), text)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images.

        Args:
            values (`dict`): By name, a list of images: arrays of shape (height, width, channels) or PIL images.
            step (`int`, *optional*): The training step.
            kwargs: For `mlflow.MlflowClient.log_image`.
        """
        import mlflow

        client = mlflow.MlflowClient()
        for name, images in values.items():
            for image in images:
                client.log_image(self._id, image, key=_name(name), step=step, **kwargs)

    @override
    def _log_table(self, table: Table, step: int | None, kwargs: dict[str, Any]) -> None:
        import mlflow

        stem = table.name.removesuffix(".json") + (f"_{step}" if step is not None else "")
        dataframe = table.dataframe
        if dataframe is None:
            rows = table.data or []
            names = table.columns or [str(index) for index in range(len(rows[0]) if rows else 0)]
            dataframe = {name: [row[index] for row in rows] for index, name in enumerate(names)}
        mlflow.log_table(dataframe, artifact_file=f"{stem}.json", **{"run_id": self._id, **kwargs})

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Log a figure as an artifact of the run.

        Args:
            figure (`matplotlib.figure.Figure` or `plotly.graph_objects.Figure`): The figure.
            artifact_file (`str`): Name of the file, such as "loss.png".
            save_kwargs: For the function that writes the figure.
        """
        import mlflow

        mlflow.log_figure(figure=figure, artifact_file=artifact_file, save_kwargs=save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Log the files of a folder as artifacts of the run.

        Args:
            local_dir (`str` or path): The folder.
            artifact_path (`str`, *optional*): Folder among the artifacts to put them into.
        """
        import mlflow

        mlflow.log_artifacts(os.fspath(local_dir), artifact_path=artifact_path, run_id=self._id)

    @on_main_process
    def log_artifact(self, local_path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Log a file as an artifact of the run.

        Args:
            local_path (`str` or path): The file.
            artifact_path (`str`, *optional*): Folder among the artifacts to put it into.
        """
        import mlflow

        mlflow.log_artifact(os.fspath(local_path), artifact_path=artifact_path, run_id=self._id)

    @override
    def _close(self) -> None:
        self._end("FINISHED")

    @on_main_process
    @override
    def abort(self, reason: str) -> None:
        """End the run as failed, or as killed by SIGTERM."""
        self._end("KILLED" if reason == "SIGTERM" else "FAILED")

    def _end(self, status: str) -> None:
        import mlflow

        active = mlflow.active_run()
        if active is not None and self.active_run is not None and active.info.run_id == self._id:
            mlflow.end_run(status)
        elif self.active_run is not None:  # ended from another thread than the one that started it
            mlflow.MlflowClient().set_terminated(self._id, status)


def _tags(value: dict[str, Any] | str | None, source: str) -> dict[str, Any]:
    if not value:
        return {}
    try:
        tags = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        tags = None
    if not isinstance(tags, dict):
        raise ValueError(f'{source}={value!r} is not a dictionary of tags. Use one, as JSON {{"team": "vision"}}.')
    return dict(tags)


def _name(name: Any) -> str:
    return FORBIDDEN_IN_PATHS.sub("_", FORBIDDEN.sub("_", str(name))) or "_"
