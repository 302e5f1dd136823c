"""Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from accel_state.public_names import known_as
from accel_tracking.tracker import on_main_process
from accel_tracking.trackers.service import LogsArtifacts, LogsTables, ServiceTracker, Table
from accel_tracking.values import MEDIA, presentable

if TYPE_CHECKING:
    import wandb

SHOWN = MEDIA | {"wandb", "bokeh", "moviepy", "rdkit"}


@known_as("accelerate.tracking.WandBTracker")
class WandBTracker(LogsTables, LogsArtifacts, ServiceTracker["wandb.Run"]):
    """Logs to Weights & Biases; without an account or network with `WANDB_MODE=offline`.

    When the training script constructs it, it logs from every process, for grouped runs. Further arguments of `log_table`
    go to `wandb.Table`, those of `log_artifact` (`type`, `aliases`) to `wandb.Run.log_artifact`.

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
    run_attribute = "run"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)

    @override
    def _open(self) -> wandb.Run:
        import wandb

        return wandb.init(**{"project": self.run_name, **self.init_kwargs})

    @override
    def _store_config(self, config: dict[str, Any]) -> None:
        self.tracker.config.update(config, allow_val_change=True)

    @on_main_process
    @override
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values as they are.

        Args:
            values (`dict`): Whatever `wandb.Run.log` takes: numbers, strings, dictionaries, media. Other objects become
                strings.
            step (`int`, *optional*): The training step; must not decrease.
            kwargs: For `wandb.Run.log`.
        """
        try:
            self.tracker.log({str(name): value for name, value in values.items()}, step=step, **kwargs)
        except TypeError:  # of a value that cannot be serialized
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

    @override
    def _log_table(self, table: Table, step: int | None, kwargs: dict[str, Any]) -> None:
        import wandb

        self.tracker.log({table.name: wandb.Table(**table.arguments, **kwargs)}, step=step)

    @override
    def _log_artifact(self, path: str, name: str | None, kwargs: dict[str, Any]) -> None:
        self.tracker.log_artifact(path, name=name, **kwargs)

    @override
    def _close(self) -> None:
        self.tracker.finish()

    @on_main_process
    @override
    def abort(self, reason: str) -> None:
        if self.run is not None:
            self.run.finish(exit_code=1)
