"""`GeneralTracker`: the interface of experiment trackers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from accel_state.processes import PartialState
from accel_state.public_names import known_as

P = ParamSpec("P")
R = TypeVar("R")

REQUIRED = ("name", "requires_logging_directory", "tracker")


def on_main_process(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate a tracker's method to do nothing on processes other than the main one.

    Trackers that set `main_process_only = False` run it on every process.

    Example:
        ```python
        class CsvTracker(GeneralTracker):
            @on_main_process
            def log(self, values, step=None, **kwargs):
                self.writer.writerow([step, *values.values()])
        ```
    """

    @wraps(function)
    def on_main(*args: P.args, **kwargs: P.kwargs) -> R | None:
        runs_everywhere = bool(args) and not getattr(args[0], "main_process_only", False)
        if runs_everywhere or PartialState().is_main_process:
            return function(*args, **kwargs)
        return None

    return on_main


@known_as("accelerate.tracking.GeneralTracker")
class GeneralTracker:
    """Base class of experiment trackers; subclass it to log metrics to a service or file of your own.

    A subclass defines three names. `name` (`str`): how `Accelerator.get_tracker` finds it.
    `requires_logging_directory` (`bool`): whether it needs a folder. `tracker` (property): the object of its
    library, which `get_tracker(name, unwrap=True)` returns. It overrides the methods it needs. An
    accelerator calls them on the main process only.

    Raises:
        NotImplementedError: When the subclass lacks one of these names.

    Example:
        ```python
        class MemoryTracker(GeneralTracker):
            name = "memory"
            requires_logging_directory = False

            def __init__(self):
                super().__init__()
                self.rows = []

            @property
            def tracker(self):
                return self.rows

            def log(self, values, step=None, **kwargs):
                self.rows.append((step, values))


        accelerator = Accelerator(log_with=MemoryTracker())
        ```
    """

    name: str
    requires_logging_directory: bool
    main_process_only = True

    if TYPE_CHECKING:

        @property
        def tracker(self) -> Any:
            """The object of the library that the tracker uses."""

    def __init__(self, _blank: bool = False) -> None:
        if _blank:  # a placeholder that accepts every call, where there is no tracker
            return
        missing = [name for name in REQUIRED if not hasattr(type(self), name) and name not in vars(self)]
        if missing:
            raise NotImplementedError(
                f"{type(self).__name__} cannot be used as a tracker yet: define "
                f"{', '.join(map(repr, missing))} in the class ('tracker' as a property)."
            )

    def start(self) -> None:
        """Start the run; called by `Accelerator.init_trackers` before anything is stored."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the hyperparameters of the run.

        Args:
            values (`dict`): Hyperparameters by name; plain values.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log metrics.

        Args:
            values (`dict`): Values by name.
            step (`int`, *optional*): The training step they belong to.
            kwargs: What `Accelerator.log(..., log_kwargs={name: {...}})` holds for this tracker.
        """

    def finish(self) -> None:
        """End the run: write pending values and close files and connections."""

    def abort(self, reason: str) -> None:
        """End the run of a process that fails; like `finish`, unless the service can tell the two apart.

        Args:
            reason (`str`): The error that ends the process, or "SIGTERM".
        """
        self.finish()
