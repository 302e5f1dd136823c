"""ClearML."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from accel_state.public_names import known_as
from accel_tracking.tracker import GeneralTracker, on_main_process
from accel_tracking.values import non_finite, plain_settings, sort_values

if TYPE_CHECKING:
    from clearml import Task

PREFIXES = ("eval", "test", "train")  # curves of these belong into one plot: "eval_loss" and "train_loss"


@known_as("accelerate.tracking.ClearMLTracker")
class ClearMLTracker(GeneralTracker):
    """Logs to a ClearML task: the one that the program has begun, or else one of its own.

    `CLEARML_PROJECT` and `CLEARML_TASK` name project and task of a new one, unless `kwargs` do. Without an account or
    network, call `clearml.Task.set_offline(True)` first.

    Args:
        run_name (`str`, *optional*): Name of the project, and of the task.
        kwargs: For `clearml.Task.init`.
    """

    user_provided_run_name: str | None
    init_kwargs: dict[str, Any]
    task: Task | None

    name = "clearml"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.user_provided_run_name = run_name
        self.init_kwargs = kwargs
        self.task = None
        self._is_ours = False

    @property
    def tracker(self) -> Task:
        """The `clearml.Task`."""
        assert self.task is not None, "asked for before start()"
        return self.task

    @on_main_process
    def start(self) -> None:
        """Take the program's task, or begin one."""
        from clearml import Task

        self.task = Task.current_task()
        if self.task is not None:
            return
        names = {
            "project_name": os.environ.get("CLEARML_PROJECT", self.user_provided_run_name),
            "task_name": os.environ.get("CLEARML_TASK", self.user_provided_run_name),
        }
        self.task = Task.init(**{**names, **self.init_kwargs})
        self._is_ours = True

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings as the task's configuration.

        Args:
            values (`dict`): The settings.
        """
        self.tracker.connect_configuration(plain_settings(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report numbers: as points of a curve, or as single values without a step; texts go to the task's console.

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
        for name, given in values.items():
            title, series = title_and_series(str(name))
            images = given if isinstance(given, (list, tuple)) else [given]
            for place, image in enumerate(images):
                picture = (
                    {"local_path": os.fspath(image)} if isinstance(image, (str, os.PathLike)) else {"image": image}
                )
                label = series if len(images) == 1 else f"{series}_{place}"
                logger.report_image(title=title, series=label, iteration=step, **picture, **kwargs)

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
        """Report a table, given as columns and rows or as a data frame.

        Args:
            table_name (`str`): Name of the table.
            columns (list of `str`, *optional*): Names of the columns.
            data (list of lists, *optional*): The rows.
            dataframe (`pandas.DataFrame`, *optional*): Both at once; then `columns` and `data` are not used.
            step (`int`, *optional*): The training step.
            kwargs: For `Logger.report_table`.

        Raises:
            ValueError: When neither rows nor a data frame are given.
        """
        if dataframe is None and data is None:
            raise ValueError(f"The table {table_name!r} has no content: pass data (and columns), or dataframe.")
        table = dataframe if dataframe is not None else [*([columns] if columns else []), *(data or [])]
        title, series = title_and_series(table_name)
        self.tracker.get_logger().report_table(title=title, series=series, table_plot=table, iteration=step, **kwargs)

    @on_main_process
    def log_artifact(
        self, local_path: str | os.PathLike[str], artifact_path: str | None = None, **kwargs: Any
    ) -> None:
        """Keep a file or folder with the task.

        Args:
            local_path (`str` or path): The file or folder.
            artifact_path (`str`, *optional*): Name of the artifact; that of the file if left out.
            kwargs: For `Task.upload_artifact`.
        """
        path = os.fspath(local_path)
        name = artifact_path or os.path.basename(os.path.normpath(path))
        self.tracker.upload_artifact(name, artifact_object=path, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Send what is left; close the task if it was begun here."""
        if self.task is None:
            return
        self.task.get_logger().flush()
        if self._is_ours:
            self.task.close()

    @on_main_process
    def abort(self, reason: str) -> None:
        """Send what is left and mark the task as failed, if it was begun here."""
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
