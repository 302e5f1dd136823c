"""Which trackers there are, and which of them a user asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from accel_state.enums import LoggerType
from accel_tracking.tracker import GeneralTracker

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {}
"""Tracker classes that can be asked for by name."""

SERVICES = tuple(member.value for member in LoggerType if member is not LoggerType.ALL)


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let `Accelerator(log_with=tracker_class.name)` find a tracker class of your own.

    `Accelerator.init_trackers` makes the instance: from the run's name, the logging folder when
    `requires_logging_directory`, and the `init_kwargs` for this name.

    Raises:
        ValueError: When it is not a subclass of `GeneralTracker` with a `name`.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ValueError(f"{tracker_class!r} cannot be registered: pass a subclass of GeneralTracker.")
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str):
        raise ValueError(f"{tracker_class!r} has name={name!r}: give the class a `name` that is a text.")
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def get_available_trackers() -> list[str]:
    """Names that can be passed as `log_with` here."""
    return list(LOGGER_TYPE_TO_CLASS)


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[GeneralTracker | str]:
    """Check what a user wants to log with.

    Args:
        log_with: A tracker instance, the name of a registered class, "all" for every registered class, or a list or
            tuple of these; None for nothing.
        logging_dir (`str` or path, *optional*): Where trackers that need a folder may write.

    Returns:
        Instances as they are and names of classes still to be instantiated, in order and without repeats.

    Raises:
        ValueError: For something that is neither tracker nor name, or a class that needs a folder when there is none.
        NotImplementedError: For a service this release cannot log to.
    """
    if log_with is None:
        return []
    entries = log_with if isinstance(log_with, (list, tuple)) else [log_with]
    chosen: list[GeneralTracker | str] = []
    for entry in entries:
        for tracker in _resolve(entry):
            if isinstance(tracker, str):
                _check_folder(tracker, logging_dir)
            if tracker not in chosen:
                chosen.append(tracker)
    return chosen


def _resolve(entry: Any) -> Sequence[GeneralTracker | str]:
    if isinstance(entry, GeneralTracker):
        return [entry]
    name = entry.value if isinstance(entry, LoggerType) else entry
    if name == LoggerType.ALL.value:
        return list(LOGGER_TYPE_TO_CLASS)
    if isinstance(name, str) and name in LOGGER_TYPE_TO_CLASS:
        return [name]
    if isinstance(name, str) and name in SERVICES:
        raise NotImplementedError(
            f"log_with={name!r}: logging to this service is not part of this release yet. Pass an instance of a "
            "GeneralTracker subclass of your own instead, or register its class with register_tracker_class."
        )
    hint = f" Pass an instance: {name.__name__}(...)." if isinstance(name, type) else ""
    known = ", ".join(map(repr, [LoggerType.ALL.value, *LOGGER_TYPE_TO_CLASS, *SERVICES]))
    raise ValueError(
        f"log_with={name!r} is not a tracker.{hint} It takes instances of GeneralTracker subclasses and these "
        f"names: {known}."
    )


def _check_folder(name: str, logging_dir: str | os.PathLike[str] | None) -> None:
    if logging_dir is None and getattr(LOGGER_TYPE_TO_CLASS[name], "requires_logging_directory", False):
        raise ValueError(
            f"log_with={name!r} needs a folder to write to: pass project_dir to Accelerator, or logging_dir in its "
            "ProjectConfiguration."
        )
