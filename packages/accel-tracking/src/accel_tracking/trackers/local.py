"""A tracker without account, server or further packages: it records a run in the project's folder."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from typing_extensions import override

from accel_ops.files.durable import fsync_folder, make_folder
from accel_state.processes import PartialState
from accel_tracking.local.record import FILE, FOLDER, FORMAT, Record, encode, process_identity
from accel_tracking.tracker import GeneralTracker, on_main_process
from accel_tracking.trackers.service import LogsTables, Table
from accel_tracking.values import plain, plain_settings


class LocalTracker(LogsTables, GeneralTracker):
    """Records a run in `logging_dir/tracking/<run>/record.jsonl`; `accelerate runs` lists, compares and exports runs.

    Logging costs the training thread microseconds. What was logged survives errors, signals, a full disk and power
    cuts; the last milliseconds before a power cut or `kill -9` may be missing.

    Args:
        run_name (`str`): Name of the run; runs of one name form a series.
        logging_dir (`str` or path): Folder of all runs.
        run_id (`str`, *optional*): Name of the run's folder; an earlier run of this name is resumed. Points that the
            earlier run logged after the step at which it is resumed are not shown. Built from name and time if left
            out.
        notes (`str`, *optional*): Notes, shown with the run.
        sync_seconds (`float`): Minimum time between two fsync calls; 0 (the default) syncs each step.

    Raises:
        ValueError: For a `run_id` that cannot be the name of a folder.

    Example:
        ```python
        accelerator = Accelerator(log_with="local", project_dir="runs/digits")
        accelerator.init_trackers("digits", config={"learning_rate": 1e-3})
        accelerator.log({"loss": 0.25}, step=1)
        accelerator.end_training()
        ```
    """

    name = "local"
    requires_logging_directory = True

    def __init__(
        self,
        run_name: str,
        logging_dir: str | os.PathLike[str],
        run_id: str | None = None,
        notes: str | None = None,
        sync_seconds: float = 0.0,
    ) -> None:
        super().__init__()
        if run_id is not None and (run_id in ("", ".", "..") or re.search(r"[/\\\0]", run_id)):
            raise ValueError(f"run_id={run_id!r} cannot be the name of a folder. Use letters, digits, '-' and '_'.")
        self.run_name = run_name
        self.run_id = run_id or _new_id(run_name)
        self.folder = Path(logging_dir, FOLDER, self.run_id)
        self.notes = notes
        self.sync_seconds = sync_seconds
        self.record: Record | None = None

    @property
    def tracker(self) -> LocalTracker:
        """This tracker itself, because there is no other library."""
        return self

    @on_main_process
    @override
    def start(self) -> None:
        """Create the folder and start the record, or resume that of an earlier run."""
        make_folder(self.folder)
        is_continued = (self.folder / FILE).exists()
        self.record = Record(self.folder / FILE, self.sync_seconds)
        fsync_folder(self.folder)
        self._append(
            kind="start",
            format=FORMAT,
            name=self.run_name,
            notes=self.notes,
            continued=is_continued,
            command=sys.argv,
            python=sys.version.split()[0],
            processes=PartialState().num_processes,
            **process_identity(),
        )

    def _append(self, **fields: Any) -> None:
        if self.record is not None:
            self.record.append(encode(plain({**fields, "time": round(time.time(), 3)})))

    @on_main_process
    @override
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the hyperparameters.

        Args:
            values (`dict`, dataclass or `argparse.Namespace`): The hyperparameters; what JSON cannot hold
                becomes a string.
        """
        self._append(kind="settings", values=plain_settings(values))

    @override
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers and strings.

        Args:
            values (`dict`): Values by name. Tensors with one element become numbers, dictionaries of numbers
                `group/name`; NaN and infinities are kept; everything else becomes a string.
            step (`int`, *optional*): The training step; one more than the last one if left out.
            kwargs: None are known.

        Raises:
            TypeError: For further arguments.
            OSError: When earlier lines could not be written.
        """
        if self.record is None:  # another process, or before the start
            return
        if kwargs:
            raise TypeError(f"log_kwargs for the tracker 'local' are {kwargs!r}, but it takes none. Leave them out.")
        now = round(time.time(), 3)
        try:
            line = encode({"step": step, "time": now, "values": values})
        except (TypeError, ValueError, RecursionError):  # tensors, NaN, objects, dictionaries that contain themselves
            line = encode({"step": step, "time": now, "values": plain(values)})
        self.record.append(line)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Save images as PNG files.

        Args:
            values (`dict`): By name, an image or a list of them: arrays or tensors of shape (height, width),
                (height, width, channels) or (channels, height, width), of 8-bit integers or floats in [0, 1].
            step (`int`, *optional*): The training step.
            kwargs: None are used.

        Raises:
            ValueError: For an image of another shape.
        """
        from accel_tracking.local.png import encode_png

        for name, value in values.items():
            images = value if isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) == 4 else [value]
            for index, image in enumerate(images):
                file = f"images/{_slug(str(name))}-{'last' if step is None else step}-{index}.png"
                (self.folder / file).parent.mkdir(exist_ok=True)
                (self.folder / file).write_bytes(encode_png(image))
                self._append(kind="image", name=str(name), step=step, file=file)

    @override
    def _log_table(self, table: Table, step: int | None, kwargs: dict[str, Any]) -> None:  # kwargs: none are used
        columns, data = table.columns, table.data
        if table.dataframe is not None:
            columns, data = [str(name) for name in table.dataframe.columns], table.dataframe.values.tolist()
        self._append(kind="table", name=table.name, step=step, columns=columns or [], data=data or [])

    @on_main_process
    def log_artifact(self, local_path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Copy a file or folder into the run's folder.

        Args:
            local_path (`str` or path): The file or folder.
            artifact_path (`str`, *optional*): Its name there; that of the file if left out.

        Raises:
            FileNotFoundError: When there is no such file.
            ValueError: For a name that leads out of the run's folder.
        """
        source = Path(local_path)
        artifacts = (self.folder / "artifacts").resolve()
        target = (artifacts / (artifact_path or source.resolve().name)).resolve()
        if artifacts not in target.parents:
            raise ValueError(f"artifact_path={artifact_path!r} leads out of the run's folder. Use a name below it.")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy2(source, target)
        self._append(kind="artifact", file=target.relative_to(self.folder.resolve()).as_posix())

    @on_main_process
    @override
    def finish(self) -> None:
        """Record that the run finished, and wait until the record is synced to disk."""
        self._end("finished")

    @on_main_process
    @override
    def abort(self, reason: str) -> None:
        """Record the error that ended the run, and wait until the record is synced to disk."""
        self._end("terminated" if reason == "SIGTERM" else "failed", reason)

    def _end(self, status: str, reason: str | None = None) -> None:
        record = self.record
        if record is None:
            return
        try:
            self._append(kind="end", status=status, reason=reason)
        finally:
            self.record = None
            record.close()


def _new_id(run_name: str) -> str:
    return f"{_slug(run_name)}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")[:60] or "run"
