"""The registry of tracker classes, and the selection of those that a user asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from accel_state import libraries
from accel_state.enums import LoggerType
from accel_state.errors import MissingLibraryError, missing_library
from accel_state.guessing import closest
from accel_state.warning import warn_user
from accel_tracking.tracker import GeneralTracker

ENTRY_POINTS = "accelerate.trackers"
"""Group of entry points in which other packages name their tracker classes."""


class Service(NamedTuple):
    """A tracker of this package.

    Attributes:
        module: Where its class is defined; imports no library of a service.
        class_name: Name of the class.
        is_available: Whether its library is installed.
        library: The library as `pip install` knows it.
        extra: The extra of `accelerate` that installs the library; empty when none is needed.
    """

    module: str
    class_name: str
    is_available: Callable[[], bool] = lambda: True
    library: str = ""
    extra: str = ""


def _service(name: str, class_name: str, is_available: Callable[[], bool], library: str = "") -> Service:
    library = library or name
    return Service(f"accel_tracking.trackers.{name}", class_name, is_available, library, library)


SERVICES: dict[str, Service] = {
    "local": Service("accel_tracking.trackers.local", "LocalTracker"),
    "aim": _service("aim", "AimTracker", libraries.is_aim_available),
    "tensorboard": _service("tensorboard", "TensorBoardTracker", libraries.is_tensorboard_available),
    "wandb": _service("wandb", "WandBTracker", libraries.is_wandb_available),
    "trackio": _service("trackio", "TrackioTracker", libraries.is_trackio_available),
    "comet_ml": _service("comet_ml", "CometMLTracker", libraries.is_comet_ml_available, library="comet-ml"),
    "mlflow": _service("mlflow", "MLflowTracker", libraries.is_mlflow_available),
    "clearml": _service("clearml", "ClearMLTracker", libraries.is_clearml_available),
    "dvclive": _service("dvclive", "DVCLiveTracker", libraries.is_dvclive_available),
    "swanlab": _service("swanlab", "SwanLabTracker", libraries.is_swanlab_available),
}

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {}
"""Registered and loaded tracker classes by name; they take precedence over services and entry points of that name."""


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Register a tracker class for `Accelerator(log_with=tracker_class.name)`.

    `Accelerator.init_trackers` creates the instance: from the run's name, the logging folder when
    `requires_logging_directory`, and the `init_kwargs` for this name. A package registers its class without being
    imported by an entry point in the group `accelerate.trackers`.

    A class with the name of a registered one replaces it, with a warning.

    Raises:
        ValueError: When it is not a subclass of `GeneralTracker` with `name` and `requires_logging_directory`.
    """
    name = _checked(tracker_class).name
    if not hasattr(tracker_class, "requires_logging_directory"):
        raise ValueError(
            f"{tracker_class!r} has no `requires_logging_directory`. Set it to True or False in the class."
        )
    if LOGGER_TYPE_TO_CLASS.get(name, tracker_class) is not tracker_class or name in SERVICES:
        warn_user(f"{tracker_class!r} replaces the registered tracker {name!r}.", UserWarning)
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def _checked(tracker_class: Any) -> type[GeneralTracker]:
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ValueError(f"{tracker_class!r} cannot be registered. Pass a subclass of GeneralTracker.")
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str):
        raise ValueError(f"{tracker_class!r} has name={name!r}. Give the class a `name` that is a str.")
    return tracker_class


def tracker_class(name: str) -> type[GeneralTracker]:
    """The class of a tracker, by its name.

    Raises:
        ValueError: When there is none of this name.
        ImportError: When the library it needs is not installed, with the command that installs it.
    """
    if name in LOGGER_TYPE_TO_CLASS and not is_service(name):
        return LOGGER_TYPE_TO_CLASS[name]
    if name in SERVICES:
        service = SERVICES[name]
        if not service.is_available():
            raise missing_library(service.library, extra=service.extra, why=f"log_with={name!r}")
        return service_class(name)
    for entry in _entry_points(name):
        return _checked(entry.load())
    raise _unknown(name)


def service_class(name: str) -> type[GeneralTracker]:
    """The class of one of this package's trackers, its library installed or not."""
    service = SERVICES[name]
    implementation: type[GeneralTracker] = getattr(import_module(service.module), service.class_name)
    return implementation


def load_services() -> None:
    """Add the classes of all services to `LOGGER_TYPE_TO_CLASS`; none of their libraries is imported."""
    for name in SERVICES:
        LOGGER_TYPE_TO_CLASS.setdefault(name, service_class(name))


def is_service(name: str) -> bool:
    """Whether a name is one of this package's trackers, and no registered class has replaced it."""
    if name not in SERVICES:
        return False
    return name not in LOGGER_TYPE_TO_CLASS or LOGGER_TYPE_TO_CLASS[name] is service_class(name)


def get_available_trackers() -> list[str]:
    """Names that can be passed as `log_with` here: those whose library is installed, and registered ones."""
    services = [name for name, service in SERVICES.items() if service.is_available()]
    registered = [name for name in LOGGER_TYPE_TO_CLASS if not is_service(name)]
    return list(dict.fromkeys([*services, *(entry.name for entry in _entry_points()), *registered]))


def _entry_points(name: str | None = None) -> Sequence[Any]:
    from importlib.metadata import entry_points

    entries = entry_points(group=ENTRY_POINTS)
    return list(entries if name is None else entries.select(name=name))


def filter_trackers(
    log_with: Any, logging_dir: str | os.PathLike[str] | None = None
) -> list[GeneralTracker | LoggerType | str]:
    """Check the trackers that a user asked for.

    Args:
        log_with: A tracker instance, a tracker's name, "all" for every tracker that is installed and has what it
            needs, or a list or tuple of these; None for nothing.
        logging_dir (`str` or path, *optional*): Where trackers that need a folder may write.

    Returns:
        The given instances, and classes still to be instantiated, as their `LoggerType` or, without one, their name; in order
        and without duplicates. Those whose library is not installed are left out with a warning, which has the command that
        installs it.

    Raises:
        ValueError: For an item that is neither a tracker nor a known name, or a class that needs a folder without one.
    """
    if log_with is None:
        return []
    entries = log_with if isinstance(log_with, (list, tuple)) else [log_with]
    trackers: list[GeneralTracker | LoggerType | str] = []
    for entry in entries:
        try:
            resolved = _resolve(entry, logging_dir)
        except MissingLibraryError as error:
            warn_user(f"{error}. Until then the run goes on without this tracker.")
            continue
        trackers += [tracker for tracker in map(_member, resolved) if tracker not in trackers]
    return trackers


def _member(tracker: GeneralTracker | str) -> GeneralTracker | LoggerType | str:
    """The `LoggerType` of a name that has one, for which programs look in `accelerator.log_with`."""
    return LoggerType(tracker) if tracker in LoggerType.list() else tracker


def _resolve(entry: Any, logging_dir: str | os.PathLike[str] | None) -> Sequence[GeneralTracker | str]:
    if isinstance(entry, GeneralTracker):
        return [entry]
    name = entry.value if isinstance(entry, LoggerType) else entry
    if name == LoggerType.ALL.value:
        return [name for name in get_available_trackers() if logging_dir is not None or not _needs_folder(name)]
    if not isinstance(name, str):
        raise _unknown(name)
    if _needs_folder(name) and logging_dir is None:
        raise ValueError(
            f"Logging with `{name}` requires a `logging_dir` to write to. Pass project_dir to Accelerator, or logging_dir in "
            "its ProjectConfiguration."
        )
    return [name]


def _needs_folder(name: str) -> bool:
    return bool(getattr(tracker_class(name), "requires_logging_directory", False))


def _unknown(name: Any) -> ValueError:
    """The error for an unknown tracker, with a suggestion."""
    hint = f" Pass an instance: {name.__name__}(...)." if isinstance(name, type) else ""
    names = [LoggerType.ALL.value, *SERVICES, *(entry.name for entry in _entry_points()), *LOGGER_TYPE_TO_CLASS]
    if isinstance(name, str) and (close := closest(name, names)):
        hint = f" Did you mean {close!r}?"
    return ValueError(
        f"log_with={name!r} is not a tracker.{hint} It takes instances of GeneralTracker subclasses and these "
        f"names: {', '.join(map(repr, dict.fromkeys(names)))}."
    )
