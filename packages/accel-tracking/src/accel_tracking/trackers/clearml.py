"""ClearML."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from accel_state.public_names import known_as
from accel_tracking.tracker import on_main_process
from accel_tracking.trackers.service import LogsArtifacts, LogsTables, ServiceTracker, Table, numbered
from accel_tracking.values import non_finite, sort_values

if TYPE_CHECKING:
    from clearml import Task

PREFIXES = ("eval", "test", "train")  # the curves of these share a plot: "eval_loss" and "train_loss"


@known_as("accelerate.tracking.ClearMLTracker")
class ClearMLTracker(LogsTables, LogsArtifacts, ServiceTracker["Task"]):
    """Logs to a ClearML task: the program's current one, or a new one.

    `CLEARML_PROJECT` and `CLEARML_TASK` name the project and the new task, unless `kwargs` do. Without an account or
    network, call `clearml.Task.set_offline(True)` first. Further arguments of `log_table` go to `Logger.report_table`
    (a table without content is a `ValueError`), those of `log_artifact` to `Task.upload_artifact`. Only a
    task that this tracker created is closed, or marked as failed, at the end.

    Args:
        run_name (`str`, *optional*): Name of the project, and of the task.
        kwargs: For `clearml.Task.init`.
    """

    user_provided_run_name: str | None
    init_kwargs: dict[str, Any]
    task: Task | None

    name = "clearml"
    requires_logging_directory = False
    run_attribute = "task"

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.user_provided_run_name = run_name
        self._is_ours = False

    @override
    def _open(self) -> Task:
        from clearml import Task

        current: Task | None = Task.current_task()
        if current is not None:
            return current
        names = {
            "project_name": os.environ.get("CLEARML_PROJECT", self.user_provided_run_name),
            "task_name": os.environ.get("CLEARML_TASK", self.user_provided_run_name),
        }
        task: Task = Task.init(**{**names, **self.init_kwargs})
        self._is_ours = True
        return task

    @override
    def _store_config(self, config: dict[str, Any]) -> None:
        self.tracker.connect_configuration(config)

    @on_main_process
    @override
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report numbers: as points of a curve, or as single values without a step; strings go to the console.

        Args:
            values (`dict`): Values by name. Names that begin with "train_", "eval_" or "test_" share a plot. NaN and
                infinities, which ClearML would draw as 0, go to the console.
            step (`int`, *optional*): The training step.
            kwargs: For `Logger.report_scalar` or `Logger.report_single_value`.
        """
        logger = self.tracker.get_logger()
        logged = sort_values(values)
        for name, value in logged.flat().items():
            if not math.isfinite(value):  # would be drawn as 0
                logged.texts[name] = non_finite(value)
            elif step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = title_and_series(name)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)
        for name, text in logged.texts.items():
            logger.report_text(f"{name}: {text}" if step is None else f"{name} (step {step}): {text}")

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report images.

        Args:
            values (`dict`): By name, an array of shape (height, width, channels), a PIL image, a path, or a list of
                these.
            step (`int`, *optional*): The training step.
            kwargs: For `Logger.report_image`.
        """
        logger = self.tracker.get_logger()
        for name, value in values.items():
            title, series = title_and_series(str(name))
            for label, image in numbered(series, value):
                is_path = isinstance(image, (str, os.PathLike))
                picture = {"local_path": os.fspath(image)} if is_path else {"image": image}
                logger.report_image(title=title, series=label, iteration=step, **picture, **kwargs)

    @override
    def _log_table(self, table: Table, step: int | None, kwargs: dict[str, Any]) -> None:
        if table.dataframe is None and table.data is None:
            raise ValueError(f"The table {table.name!r} has no content. Pass data (and columns), or dataframe.")
        rows = [*([table.columns] if table.columns else []), *(table.data or [])]
        plot = table.dataframe if table.dataframe is not None else rows
        title, series = title_and_series(table.name)
        self.tracker.get_logger().report_table(title=title, series=series, table_plot=plot, iteration=step, **kwargs)

    @override
    def _log_artifact(self, path: str, name: str | None, kwargs: dict[str, Any]) -> None:
        name = name or os.path.basename(os.path.normpath(path))
        self.tracker.upload_artifact(name, artifact_object=path, **kwargs)

    @override
    def _close(self) -> None:
        self.tracker.get_logger().flush()
        if self._is_ours:
            self.tracker.close()

    @on_main_process
    @override
    def abort(self, reason: str) -> None:
        """Flush, and mark the task as failed with the error, if this tracker created it."""
        if self.task is None:
            return
        self.task.get_logger().flush()
        if self._is_ours:
            self.task.mark_failed(status_reason=reason)
            self.task.close()


def title_and_series(name: str) -> tuple[str, str]:
    """Plot and curve of a metric: `"eval_loss"` is the curve "eval" in the plot "loss"; the default curve is "train"."""
    prefix, _, rest = name.partition("_")
    return (rest, prefix) if prefix in PREFIXES and rest else (name, "train")
