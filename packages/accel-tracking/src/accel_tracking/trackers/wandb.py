"""Weights & Biases."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from accel_state.public_names import known_as
from accel_tracking.tracker import GeneralTracker, on_main_process
from accel_tracking.values import MEDIA, plain_settings, presentable

if TYPE_CHECKING:
    import wandb

SHOWN = MEDIA | {"wandb", "bokeh", "moviepy", "rdkit"}


@known_as("accelerate.tracking.WandBTracker")
class WandBTracker(GeneralTracker):
    """Logs to Weights & Biases; without an account or network with `WANDB_MODE=offline`.

    Made by hand, it works in every process, for runs in groups.

    Args:
        run_name (`str`): Name of the project.
        kwargs: For `wandb.init`.
    """

    run_name: str
    init_kwargs: dict[str, Any]
    run: wandb.Run | None

    name = "wandb"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run = None

    @property
    def tracker(self) -> wandb.Run:
        """The `wandb.Run`."""
        assert self.run is not None, "asked for before start()"
        return self.run

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        import wandb

        self.run = wandb.init(**{"project": self.run_name, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Add settings to those of the run.

        Args:
            values (`dict`): The settings.
        """
        self.tracker.config.update(plain_settings(values), allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values as they are.

        Args:
            values (`dict`): Whatever `wandb.Run.log` takes: numbers, texts, dictionaries, media. Other objects become
                text.
            step (`int`, *optional*): The training step; steps must not go back.
            kwargs: For `wandb.Run.log`.
        """
        try:
            self.tracker.log({str(name): value for name, value in values.items()}, step=step, **kwargs)
        except TypeError:  # of a value that cannot be written down
            self.tracker.log(presentable(values, SHOWN), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images.

        Args:
            values (`dict`): By name, a list of images: arrays, PIL images or paths.
            step (`int`, *optional*): The training step.
            kwargs: For `wandb.Image`.
        """
        import wandb

        images = {str(name): [wandb.Image(image, **kwargs) for image in batch] for name, batch in values.items()}
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
            kwargs: For `wandb.Table`.
        """
        import wandb

        given = {"columns": columns, "data": data} if dataframe is None else {"dataframe": dataframe}
        self.tracker.log({table_name: wandb.Table(**given, **kwargs)}, step=step)

    @on_main_process
    def log_artifact(
        self, local_path: str | os.PathLike[str], artifact_path: str | None = None, **kwargs: Any
    ) -> None:
        """Keep a file or folder with the run.

        Args:
            local_path (`str` or path): The file or folder.
            artifact_path (`str`, *optional*): Name of the artifact; chosen by the service if left out.
            kwargs: For `wandb.Run.log_artifact`, such as `type` and `aliases`.
        """
        self.tracker.log_artifact(os.fspath(local_path), name=artifact_path, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        if self.run is not None:
            self.run.finish()

    @on_main_process
    def abort(self, reason: str) -> None:
        """End the run as failed."""
        if self.run is not None:
            self.run.finish(exit_code=1)
