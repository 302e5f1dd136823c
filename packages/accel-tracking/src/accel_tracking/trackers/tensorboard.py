"""TensorBoard: event files, read by `tensorboard --logdir`."""

from __future__ import annotations

import json
import os
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_state.public_names import known_as
from accel_tracking.tracker import GeneralTracker, on_main_process
from accel_tracking.values import flatten, plain_settings, sort_values

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SECONDS_TO_DISK = 10  # so that a killed process loses little, and curves are current; the library's own is 120


@known_as("accelerate.tracking.TensorBoardTracker")
class TensorBoardTracker(GeneralTracker):
    """Writes event files to `logging_dir/run_name`.

    Args:
        run_name (`str`): Name of the run.
        logging_dir (`str` or path): Folder of all runs.
        kwargs: For `SummaryWriter`; with `flush_secs`, how often it writes to the disk (10 seconds).
    """

    run_name: str
    logging_dir_param: str | os.PathLike[str]
    logging_dir: str
    init_kwargs: dict[str, Any]
    writer: SummaryWriter | None

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir_param = logging_dir
        self.logging_dir = os.path.join(logging_dir, run_name)
        self.init_kwargs = kwargs
        self.writer = None

    @property
    def tracker(self) -> SummaryWriter:
        """The `SummaryWriter`."""
        assert self.writer is not None, "asked for before start()"
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Open the event file."""
        try:
            from torch.utils import tensorboard as library
        except ImportError:  # tensorboard itself is missing, as the registry's question allows
            library = import_module("tensorboardX")
        self.writer = library.SummaryWriter(self.logging_dir, **{"flush_secs": SECONDS_TO_DISK, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Show the settings as hyperparameters, and write them to `hparams.yml` as well.

        Args:
            values (`dict`): The settings; nested ones are shown as `outer.inner`, values of other types than number,
                truth value and text as text.
        """
        settings = plain_settings(values)
        shown = {
            name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
            for name, value in flatten(settings)
        }
        folder = Path(self.logging_dir, str(time.time()))
        self.tracker.add_hparams(shown, {}, run_name=folder.name)
        self.tracker.flush()
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"{json.dumps(name)}: {json.dumps(value)}\n" for name, value in settings.items()]  # JSON is YAML too
        (folder / "hparams.yml").write_text("".join(lines) or "{}\n")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add scalars, groups of scalars (dictionaries) and texts.

        Args:
            values (`dict`): Values by name; NaN and infinities are stored as such.
            step (`int`, *optional*): The training step.
            kwargs: For `add_scalar`, `add_scalars` or `add_text`.
        """
        logged = sort_values(values)
        for name, value in logged.numbers.items():
            self.tracker.add_scalar(name, value, global_step=step, **kwargs)
        for name, group in logged.groups.items():
            self.tracker.add_scalars(name, group, global_step=step, **kwargs)
        for name, text in logged.texts.items():
            self.tracker.add_text(name, text, global_step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add batches of images.

        Args:
            values (`dict`): By name, arrays or tensors of shape (images, channels, height, width), or another order
                that `dataformats` names; 8-bit integers or floats in [0, 1].
            step (`int`, *optional*): The training step.
            kwargs: For `SummaryWriter.add_images`.
        """
        for name, images in values.items():
            self.tracker.add_images(str(name), images, global_step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Write what is left and close the event files."""
        if self.writer is not None:
            self.writer.close()
