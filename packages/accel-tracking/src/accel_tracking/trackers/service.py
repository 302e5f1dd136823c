"""The base class of trackers of services: one run object of the service's library, used on the main process only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from typing_extensions import override

from accel_tracking.tracker import GeneralTracker, on_main_process
from accel_tracking.values import plain_settings

RunObject = TypeVar("RunObject")


class ServiceTracker(GeneralTracker, Generic[RunObject]):
    """Base of trackers that log through one object of a service's library: its run, writer, task or experiment.

    The public methods here run on the main process only, unless the tracker sets `main_process_only = False`. A
    subclass names the attribute that holds the object (`run_attribute`) and implements `_open`, `_store_config` and
    `_close`. Its own constructor and annotations show its public arguments and attributes. It adds `log`, and
    `log_images` where the service has images.

    Args:
        run_name (`str`, *optional*): Name of the run, or of the project where the service groups runs by one.
        kwargs: For the function of the library that starts a run.
    """

    run_attribute: ClassVar[str]
    """Name of the attribute that holds the library's object, None before `start()`."""

    run_name: str | None
    init_kwargs: dict[str, Any]

    def __init__(self, run_name: str | None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        setattr(self, self.run_attribute, None)

    @property
    def tracker(self) -> RunObject:
        """The library's object.

        Raises:
            AssertionError: Before `start()`.
        """
        opened: RunObject | None = getattr(self, self.run_attribute)
        assert opened is not None, "tracker is used before start()"
        return opened

    @on_main_process
    @override
    def start(self) -> None:
        setattr(self, self.run_attribute, self._open())

    def _open(self) -> RunObject:
        """Import the library and start a run."""
        raise NotImplementedError

    @on_main_process
    @override
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the run's hyperparameters.

        Args:
            values (`dict`, dataclass or `argparse.Namespace`): The hyperparameters; what JSON cannot hold becomes
                a string.

        Raises:
            TypeError: For values of another type.
        """
        self._store_config(plain_settings(values))

    def _store_config(self, config: dict[str, Any]) -> None:
        """Store plain hyperparameters."""
        raise NotImplementedError

    @on_main_process
    @override
    def finish(self) -> None:
        if getattr(self, self.run_attribute) is not None:
            self._close()

    def _close(self) -> None:
        """End a run that was started."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Table:
    """A table to log.

    Attributes:
        name: Its name.
        columns: Names of the columns; None when they have none.
        data: The rows.
        dataframe: A `pandas.DataFrame` with columns and rows; None when these are given.
    """

    name: str
    columns: list[str] | None
    data: list[list[Any]] | None
    dataframe: Any

    @property
    def arguments(self) -> dict[str, Any]:
        """The content, as the keyword arguments of wandb's `Table` and similar classes."""
        if self.dataframe is None:
            return {"columns": self.columns, "data": self.data}
        return {"dataframe": self.dataframe}


class LogsTables:
    """Mixin for trackers whose service stores tables."""

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
            dataframe (`pandas.DataFrame`, *optional*): Columns and rows in one; then `columns` and `data` are not used.
            step (`int`, *optional*): The training step.
            kwargs: For the library's own function or class; see the tracker.
        """
        self._log_table(Table(table_name, columns, data, dataframe), step, kwargs)

    def _log_table(self, table: Table, step: int | None, kwargs: dict[str, Any]) -> None:
        raise NotImplementedError


class LogsArtifacts:
    """Mixin for trackers whose service stores files."""

    @on_main_process
    def log_artifact(
        self, local_path: str | os.PathLike[str], artifact_path: str | None = None, **kwargs: Any
    ) -> None:
        """Log a file or folder as an artifact of the run.

        Args:
            local_path (`str` or path): The file or folder.
            artifact_path (`str`, *optional*): Name of the artifact; chosen by the service if left out.
            kwargs: For the library's own function; see the tracker.
        """
        self._log_artifact(os.fspath(local_path), artifact_path, kwargs)

    def _log_artifact(self, path: str, name: str | None, kwargs: dict[str, Any]) -> None:
        raise NotImplementedError


def numbered(name: str, images: Any) -> Iterator[tuple[str, Any]]:
    """Each image with its own name: `name` for a single image, `name_0`, `name_1` ... for a list of several.

    Args:
        name (`str`): The name.
        images: An image, or a list or tuple of them.
    """
    several = images if isinstance(images, (list, tuple)) else [images]
    for index, image in enumerate(several):
        yield (name if len(several) == 1 else f"{name}_{index}"), image
