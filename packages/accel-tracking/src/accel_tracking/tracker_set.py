"""The trackers of one run, which are started, called and finished together."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import index
from reprlib import repr as shorten
from typing import Any

from accel_state.enums import LoggerType
from accel_state.processes import PartialState
from accel_state.warning import warn_user
from accel_tracking.registry import is_service, tracker_class
from accel_tracking.tracker import GeneralTracker

SECONDS_TO_FLUSH = 10.0  # launchers and schedulers send SIGKILL some 30 seconds after SIGTERM

_calls: list[Callable[[str | None], None]] = []
_owner: int | None = None  # a process id: forked processes inherit the handler, but must not flush


def add_exit_callback(call: Callable[[str | None], None]) -> None:
    """Register a function that is called once before this process exits, in the main thread or another one.

    Args:
        call: Called with the reason: an error, "SIGTERM", or None for a normal exit.
    """
    global _owner
    if _owner != os.getpid():  # also in a forked process, which has inherited the calls of another
        _calls.clear()
        _owner = os.getpid()
    if not _calls:
        atexit.register(_at_exit)
        _listen()
    _calls.append(call)


def remove_exit_callback(call: Callable[[str | None], None]) -> None:
    """Remove a function that `add_exit_callback` has added."""
    with contextlib.suppress(ValueError):
        _calls.remove(call)
    if not _calls:
        atexit.unregister(_at_exit)
        _stop_listening()


def _call_all(reason: str | None) -> None:
    while _calls:
        with contextlib.suppress(Exception):  # the process exits anyway, and the other callbacks must still run
            _calls.pop()(reason)


def _at_exit() -> None:
    if _owner != os.getpid():
        return
    error = getattr(sys, "last_value", None)
    _call_all(f"{type(error).__name__}: {error}" if error is not None else None)


# ---- SIGTERM --------------------------------------------------------------------------------------------------------


def _listen() -> None:
    """Install the handler, unless the training script has installed one."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _stop_listening() -> None:
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_sigterm(signal_number: int, frame: object) -> None:
    if _owner == os.getpid():
        flushing = threading.Thread(target=_call_all, args=("SIGTERM",), name="accel-tracking-flush", daemon=True)
        flushing.start()
        flushing.join(SECONDS_TO_FLUSH)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


NETWORK_ERRORS = frozenset({"CommError", "ConnectionError", "ConnectTimeout", "ConnectError", "NewConnectionError",
                   "MaxRetryError", "NameResolutionError", "ReadTimeout", "Timeout", "TimeoutException"})  # fmt: skip
"""Error classes of HTTP libraries and trackers, by name: recognised without importing any of them."""


class TrackerSet:
    """Calls a run's trackers on the main process; elsewhere every method does nothing.

    Once started, a tracker that fails does not stop training: its first failure is a warning, the others are
    counted. Trackers that are not finished explicitly are finished when the process exits, also after an error
    and on SIGTERM.

    Args:
        wanted: What `filter_trackers` returned.
        logging_dir (`str` or path, *optional*): Folder for trackers that need one.
    """

    def __init__(
        self, wanted: Sequence[GeneralTracker | LoggerType | str], logging_dir: str | os.PathLike[str] | None = None
    ) -> None:
        self.wanted = [entry.value if isinstance(entry, LoggerType) else entry for entry in wanted]
        self.logging_dir = logging_dir
        self.active: list[GeneralTracker] = []
        """The started trackers; empty on processes other than the main one."""
        self.unreachable: set[str] = set()
        """Names of trackers whose service could not be reached at the start."""
        self._num_failures: dict[str, int] = {}
        self._is_expected = bool(self.wanted)  # that `start` is called before the first `log`

    def start(
        self,
        project_name: str | None,
        config: dict[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start every wanted tracker and store the run's hyperparameters in it.

        A tracker whose service cannot be reached is left out, with a warning.

        Args:
            project_name (`str`): Name of the run; some services choose one for None.
            config (`dict`, *optional*): Its hyperparameters.
            init_kwargs (`dict`, *optional*): Per tracker name, further constructor arguments.

        Raises:
            TypeError: When `project_name` is not a str, or `init_kwargs` not a dictionary of dictionaries.
            ImportError: When the library of a tracker is not installed.
        """
        if project_name is not None and not isinstance(project_name, str) and self._has_services:
            raise _no_name(project_name)
        self._is_expected = False
        arguments = _arguments_by_name(init_kwargs, "init_kwargs", "init_trackers")
        if not PartialState().is_main_process:
            return
        for entry in self.wanted:
            name = entry if isinstance(entry, str) else entry.name
            try:
                tracker = (
                    self._make(entry, project_name, arguments.get(entry, {})) if isinstance(entry, str) else entry
                )
                tracker.start()
                if config is not None:
                    tracker.store_init_configuration(config)
            except Exception as error:
                if not is_network_failure(error):
                    raise
                self.unreachable.add(name)
                _warn(f"Training continues without the tracker {name!r}, whose service cannot be reached", error)
                continue
            if tracker not in self.active:
                self.active.append(tracker)
        if self.active:
            remove_exit_callback(self._on_exit)
            add_exit_callback(self._on_exit)

    @property
    def _has_services(self) -> bool:
        """Whether one of the wanted trackers is from this package; for others, arguments are not checked."""
        return any(isinstance(entry, str) and is_service(entry) for entry in self.wanted)

    def _make(self, name: str, project_name: str | None, arguments: Mapping[str, Any]) -> GeneralTracker:
        factory: Any = tracker_class(name)  # its constructor is the subclass's own
        if factory.requires_logging_directory:
            if project_name is None and is_service(name):
                raise _no_name(project_name)
            return factory(project_name, self.logging_dir, **arguments)
        return factory(project_name, **arguments)

    def get(self, name: str, unwrap: bool = False) -> Any:
        """A started tracker by name.

        Returns:
            The tracker, or with `unwrap` the object of its library. On processes other than the main one,
            before trackers are started, and for one whose service could not be reached, a tracker that ignores every
            call.

        Raises:
            ValueError: On the main process, when trackers were started but none of this name.
        """
        for tracker in self.active:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if self.active and name not in self.unreachable:
            names = ", ".join(repr(tracker.name) for tracker in self.active)
            raise ValueError(f"There is no tracker {name!r} in this run. Choose from {names}.")
        return GeneralTracker(_blank=True)

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values to every started tracker.

        Args:
            values (`dict`): Values by name, or whatever the trackers take, if all of them are the user's own.
            step (`int`, *optional*): The training step they belong to; or a tensor with one integer.
            log_kwargs (`dict`, *optional*): Per tracker name, further arguments of its `log`.

        Raises:
            TypeError: When `values` is not a dictionary, or `step` not an integer, and a tracker of this package is wanted.
        """
        if not isinstance(values, Mapping) and self._has_services:
            raise TypeError(f'log({shorten(values)}) needs a dictionary. Pass {{"loss": ...}}.')
        if step is not None and type(step) is not int:
            as_int = _as_integer(step)
            if as_int is None and self._has_services:
                raise TypeError(f"step={step!r} is not an integer. Pass the number of the training step.")
            step = step if as_int is None else as_int
        arguments = _arguments_by_name(log_kwargs, "log_kwargs", "log") if log_kwargs else {}
        if self._is_expected:
            self._warn_of_no_start()
        for tracker in self.active:
            try:
                tracker.log(values, step=step, **arguments.get(tracker.name, {}))
            except Exception as error:
                self._note_failure(tracker, "log", error)

    def _warn_of_no_start(self) -> None:
        self._is_expected = False
        if not self.active and PartialState().is_main_process:
            names = ", ".join(entry if isinstance(entry, str) else entry.name for entry in self.wanted)
            warn_user(
                f"log() was called before init_trackers(), so that no tracker ({names}) has started and nothing is logged. Call "
                "accelerator.init_trackers(project_name) first."
            )

    def _note_failure(self, tracker: GeneralTracker, action: str, error: Exception) -> None:
        seen = self._num_failures.get(tracker.name, 0)
        self._num_failures[tracker.name] = seen + 1
        if not seen:
            _warn(f"Training continues although the tracker {tracker.name!r} failed in {action}()", error)

    def finish(self) -> None:
        """Finish all started trackers, the later ones too when one fails."""
        remove_exit_callback(self._on_exit)
        self._end(lambda tracker: tracker.finish())

    def _on_exit(self, reason: str | None) -> None:
        self._end((lambda tracker: tracker.finish()) if reason is None else (lambda tracker: tracker.abort(reason)))

    def _end(self, action: Callable[[GeneralTracker], None]) -> None:
        for tracker in list(self.active):
            try:
                action(tracker)
            except Exception as error:
                _warn(
                    f"The tracker {tracker.name!r} failed in finish(), so values that it had not sent yet may be lost",
                    error,
                )
            if (lost := self._num_failures.pop(tracker.name, 0)) > 1:
                _warn(
                    f"The tracker {tracker.name!r} failed in {lost} calls of log(), of which only the first was shown"
                )


def _arguments_by_name(arguments: Any, argument: str, method: str) -> Mapping[str, Mapping[str, Any]]:
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping) or not all(isinstance(kwargs, Mapping) for kwargs in arguments.values()):
        raise TypeError(
            f"{argument}={arguments!r} of {method}() is not of the form "
            '{"name of a tracker": {"argument": value}}. Pass a dictionary of dictionaries.'
        )
    return arguments


def _as_integer(step: Any) -> int | None:
    """A step as an int, also for `3.0`; None for anything else."""
    if isinstance(step, float) and step.is_integer():
        return int(step)
    try:
        return index(step)
    except TypeError:
        return None


def _no_name(project_name: Any) -> TypeError:
    return TypeError(f"project_name={project_name!r} is not the name of a run. Pass a str.")


def _warn(what: str, error: Exception | None = None) -> None:
    why = f": {type(error).__name__}: {error}" if error is not None else "."
    warn_user(what + why, RuntimeWarning)


def is_network_failure(error: BaseException) -> bool:
    """Whether an error, or what caused it, is a failure to reach another machine."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror, socket.herror)):
            return True
        if any(kind.__name__ in NETWORK_ERRORS for kind in type(error).__mro__):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return False
