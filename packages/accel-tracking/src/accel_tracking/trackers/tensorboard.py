"""TensorBoard: event files, read by `tensorboard --logdir`."""

from __future__ import annotations

import json
import os
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from accel_state.public_names import known_as
from accel_tracking.tracker import on_main_process
from accel_tracking.trackers.service import ServiceTracker
from accel_tracking.values import flatten, sort_values

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SECONDS_TO_DISK = 10  # so that a killed process loses little, and curves are current; the library's own is 120


@known_as("accelerate.tracking.TensorBoardTracker")
class TensorBoardTracker(ServiceTracker["SummaryWriter"]):
    """Writes event files to `logging_dir/run_name`.

    Hyperparameters are logged with `add_hparams` and written to `hparams.yml` too; nested ones get names such as
    `outer.inner`, and values of types other than `bool`, `int`, `float` and `str` become strings.

    Args:
        run_name (`str`): Name of the run.
        logging_dir (`str` or path): Folder of all runs.
        kwargs: For `SummaryWriter`; its `flush_secs`, the seconds between two writes to the disk, is 10 here.
    """

    run_name: str
    init_kwargs: dict[str, Any]
    logging_dir_param: str | os.PathLike[str]
    logging_dir: str
    writer: SummaryWriter | None

    name = "tensorboard"
    requires_logging_directory = True
    run_attribute = "writer"

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir_param = logging_dir
        self.logging_dir = os.path.join(logging_dir, run_name)

    @override
    def _open(self) -> SummaryWriter:
        try:
            from torch.utils import tensorboard as library
        except ImportError:  # tensorboard itself is missing; the registry's check accepts tensorboardX too
            library = import_module("tensorboardX")
        return library.SummaryWriter(self.logging_dir, **{"flush_secs": SECONDS_TO_DISK, **self.init_kwargs})

    @override
    def _store_config(self, config: dict[str, Any]) -> None:
        shown = {
            name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
            for name, value in flatten(config)
        }
        folder = Path(self.logging_dir, str(time.time()))
        self.tracker.add_hparams(shown, {}, run_name=folder.name)
        self.tracker.flush()
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"{json.dumps(name)}: {json.dumps(value)}\n" for name, value in config.items()]  # JSON is YAML too
        (folder / "hparams.yml").write_text("".join(lines) or "{}\n")

    @on_main_process
    @override
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add scalars, groups of scalars (dictionaries) and strings.

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

    @override
    def _close(self) -> None:
        self.tracker.close()
