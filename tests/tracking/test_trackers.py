"""Trackers of a user's own: conformance, choice by instance or name, and their life in a run."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state.enums import LoggerType
from accel_state.processes import PartialState
from accel_tracking import registry
from accel_tracking.registry import (
    LOGGER_TYPE_TO_CLASS,
    SERVICES,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
    tracker_class,
)
from accel_tracking.tracker import GeneralTracker, on_main_process
from accel_tracking.tracker_set import TrackerSet, is_network_failure
from accel_tracking.values import plain_settings
from tests.support.ranks import ranks
from tests.tracking.memory_tracker import MemoryTracker


class FolderTracker(MemoryTracker):
    name = "folder"
    requires_logging_directory = True

    def __init__(self, run: str, folder: str, **settings: Any) -> None:
        super().__init__(run, folder=folder, **settings)


class TheirTracker(MemoryTracker):
    name = "theirs"


class Failing(MemoryTracker):
    """Raises an error in one of its methods."""

    def __init__(self, name: str, method: str, error: Exception) -> None:
        super().__init__()

        def fail(*args: Any, **kwargs: Any) -> None:
            raise error

        self.name = name
        setattr(self, method, fail)


@pytest.fixture
def registered() -> Iterator[None]:
    before = dict(LOGGER_TYPE_TO_CLASS)
    register_tracker_class(MemoryTracker)
    register_tracker_class(FolderTracker)
    yield
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(before)


def running(*trackers: Any) -> TrackerSet:
    """Trackers of a run that has begun."""
    started = TrackerSet(list(trackers))
    started.start("digits")
    return started


# ---- conformance --------------------------------------------------------------------------------------------------------


def test_a_tracker_must_define_its_three_names() -> None:
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(NotImplementedError, match=r"Half .*'requires_logging_directory', 'tracker'"):
        Half()
    with pytest.raises(NotImplementedError, match="'name'"):
        GeneralTracker()


def test_names_set_on_the_instance_count() -> None:
    class Late(GeneralTracker):
        tracker = None  # type: ignore[assignment]

        def __init__(self) -> None:
            self.name, self.requires_logging_directory = "late", False
            super().__init__()

    assert Late().name == "late"


def test_the_blank_tracker_takes_every_call() -> None:
    blank = GeneralTracker(_blank=True)
    blank.start()
    blank.store_init_configuration({})
    blank.log({"loss": 1.0}, step=1, anything=2)
    blank.finish()


@ranks(2)
def test_on_main_process_honours_main_process_only(rank: int, world: int) -> None:
    class Somewhere(MemoryTracker):
        @on_main_process
        def where(self) -> int:
            return PartialState().process_index

    class Everywhere(Somewhere):
        main_process_only = False

    @on_main_process
    def function() -> str:
        return "ran"

    assert Somewhere().where() == (0 if rank == 0 else None)
    assert Everywhere().where() == rank
    assert function() == ("ran" if rank == 0 else None)


# ---- choosing -----------------------------------------------------------------------------------------------------------


def test_instances_come_back_in_order_and_once() -> None:
    first, second = MemoryTracker(), MemoryTracker()
    assert filter_trackers([first, second, first]) == [first, second]
    assert filter_trackers((first,)) == [first]
    assert filter_trackers(first) == [first]
    assert filter_trackers(None) == []


@pytest.fixture
def no_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no library of a service were installed."""
    for name, service in SERVICES.items():
        if service.library:
            monkeypatch.setitem(SERVICES, name, service._replace(is_available=lambda: False))


def test_registered_classes_are_found_by_name(registered: None, no_services: None) -> None:
    assert get_available_trackers() == ["local", "memory", "folder"]
    assert filter_trackers("memory") == ["memory"]
    assert filter_trackers(LoggerType.ALL, logging_dir="logs") == ["local", "memory", "folder"]
    assert filter_trackers(["memory", "all"], logging_dir="logs") == ["memory", "local", "folder"]
    assert filter_trackers("all") == ["memory"]  # those that need no folder


def test_a_class_that_needs_a_folder_says_so(registered: None) -> None:
    with pytest.raises(ValueError, match=r"`folder` requires a `logging_dir`.*project_dir"):
        filter_trackers("folder")


@pytest.mark.parametrize("service", [name for name in SERVICES if name != "local"])
def test_a_missing_library_names_the_command_that_installs_it(service: str, no_services: None) -> None:
    for asked in (service, LoggerType(service)):
        with pytest.warns(
            UserWarning, match=rf"log_with='{service}'.*pip install 'accelerate\[{SERVICES[service].extra}\]'"
        ):
            assert filter_trackers([asked, "local"], logging_dir="logs") == ["local"]


def test_services_are_listed_as_members_of_their_enum(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(SERVICES, name, SERVICES[name]._replace(is_available=lambda: True))
    assert filter_trackers(["wandb", LoggerType.WANDB, "local", "mlflow"], logging_dir="logs") == [
        LoggerType.WANDB, "local", LoggerType.MLFLOW
    ]  # fmt: skip
    assert TrackerSet([LoggerType.WANDB, "local"]).wanted == ["wandb", "local"]


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_what_accelerate_1_offers(service: str) -> None:
    tracker_class = registry.service_class(service)
    assert tracker_class.name == service
    assert tracker_class.main_process_only is (service not in ("wandb", "trackio", "swanlab"))
    assert tracker_class.requires_logging_directory is (service in ("local", "tensorboard", "aim"))
    wanted = SIGNATURES.get(service)
    assert wanted is None or list(inspect.signature(tracker_class).parameters) == wanted.split()


SIGNATURES = {
    "tensorboard": "run_name logging_dir kwargs",
    "wandb": "run_name kwargs",
    "trackio": "run_name kwargs",
    "comet_ml": "run_name kwargs",
    "aim": "run_name logging_dir kwargs",
    "mlflow": "experiment_name logging_dir run_id tags nested_run run_name description",
    "clearml": "run_name kwargs",
    "dvclive": "run_name live kwargs",
    "swanlab": "run_name kwargs",
}


def test_the_old_path_has_every_class() -> None:
    program = (
        "import sys, accelerate.tracking as t; from accel_tracking.registry import SERVICES;"
        "assert set(t.LOGGER_TYPE_TO_CLASS) == set(SERVICES), t.LOGGER_TYPE_TO_CLASS;"
        "assert all(getattr(t, c.__name__) is c and c.name == n for n, c in t.LOGGER_TYPE_TO_CLASS.items());"
        "libraries = 'aim clearml comet_ml dvclive mlflow swanlab tensorboard trackio wandb torch.utils.tensorboard';"
        "print([m for m in libraries.split() if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_another_package_names_its_tracker_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("theirs", f"{__name__}:TheirTracker", registry.ENTRY_POINTS)
    monkeypatch.setattr(entry.__class__, "load", lambda self: TheirTracker)
    monkeypatch.setattr(registry, "_entry_points", lambda name=None: [entry] if name in (None, "theirs") else [])
    assert "theirs" in get_available_trackers()
    trackers = TrackerSet(filter_trackers("theirs"))
    trackers.start("digits")
    assert trackers.get("theirs", unwrap=True) == [("made", "digits", {}), "start"]
    trackers.finish()
    with pytest.raises(ValueError, match="'theirs'"):
        filter_trackers("nobody's")


@pytest.mark.parametrize("wrong", ["nothing-like-it", 3, object(), ["wandb"], ""])
def test_what_is_no_tracker_is_refused_with_its_value(wrong: object) -> None:
    with pytest.raises(ValueError, match="is not a tracker") as caught:
        filter_trackers([wrong])
    assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("tensorbord", "Did you mean 'tensorboard'"),
        ("WandB", "Did you mean 'wandb'"),
        ("comet", "Did you mean 'comet_ml'"),
        (MemoryTracker, r"Pass an instance: MemoryTracker\(\.\.\.\)"),
    ],
)
def test_a_misspelled_name_and_a_class_get_a_hint(wrong: Any, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        filter_trackers(wrong)


def test_only_named_tracker_classes_can_be_registered() -> None:
    class Nameless(GeneralTracker):
        pass

    class Folderless(GeneralTracker):
        name = "folderless"

    for wrong, message in (
        (dict, "subclass of GeneralTracker"),
        (Nameless, "Nameless.*name=None"),
        (Folderless, "Folderless.*requires_logging_directory"),
    ):
        with pytest.raises(ValueError, match=message):
            register_tracker_class(wrong)  # type: ignore[type-var]


def test_a_class_that_takes_the_place_of_another_is_warned_of(registered: None) -> None:
    class Other(MemoryTracker):
        name = "folder"
        requires_logging_directory = True

    with pytest.warns(UserWarning, match="Other.* replaces the registered tracker 'folder'"):
        register_tracker_class(Other)
    register_tracker_class(Other)  # itself again
    assert tracker_class("folder") is Other


# ---- a run --------------------------------------------------------------------------------------------------------------


def test_a_run_calls_its_trackers_in_order() -> None:
    tracker = MemoryTracker()
    trackers = TrackerSet([tracker])
    trackers.start("digits", config={"rate": 0.1})
    trackers.log({"loss": 0.5}, step=3, log_kwargs={"memory": {"commit": True}, "other": {"x": 1}})
    trackers.log({"loss": 0.4})
    trackers.finish()
    assert tracker.calls == [
        "start",
        ("config", {"rate": 0.1}),
        ({"loss": 0.5}, 3, {"commit": True}),
        ({"loss": 0.4}, None, {}),
        "finish",
    ]


def test_named_trackers_are_made_from_run_folder_and_arguments(registered: None) -> None:
    trackers = TrackerSet(["memory", "folder"], logging_dir="logs")
    trackers.start("digits", init_kwargs={"memory": {"tags": ["a"]}})
    assert trackers.get("memory", unwrap=True) == [("made", "digits", {"tags": ["a"]}), "start"]
    assert trackers.get("folder").calls[0] == ("made", "digits", {"folder": "logs"})


def test_starting_twice_does_not_log_twice() -> None:
    tracker = MemoryTracker()
    trackers = TrackerSet([tracker])
    trackers.start("one")
    trackers.start("two")
    trackers.log({"loss": 1.0})
    assert tracker.calls == ["start", "start", ({"loss": 1.0}, None, {})]


def test_an_unknown_tracker_is_refused_once_trackers_run() -> None:
    TrackerSet([MemoryTracker()]).get("anything").log({"loss": 1.0})  # nothing started yet: a tracker that ignores all
    with pytest.raises(ValueError, match=r"no tracker 'wandb'.*'memory'"):
        running(MemoryTracker()).get("wandb")


def test_one_failing_tracker_does_not_keep_others_from_finishing() -> None:
    first, last = MemoryTracker(), MemoryTracker()
    with pytest.warns(RuntimeWarning, match="'broken' failed in finish.*disk full"):
        running(first, Failing("broken", "finish", OSError("disk full")), last).finish()
    assert (first.calls[-1], last.calls[-1]) == ("finish", "finish")


@ranks(2)
def test_only_the_main_process_tracks(rank: int, world: int, tmp_path: Path) -> None:
    tracker = MemoryTracker()
    trackers = TrackerSet([tracker])
    trackers.start("digits", {"rate": 0.1})
    trackers.log({"loss": 1.0})
    trackers.get("whatever" if rank else "memory").log({"loss": 2.0})
    trackers.finish()
    assert len(tracker.calls) == (5 if rank == 0 else 0)
    assert trackers.active == ([tracker] if rank == 0 else [])


# ---- failures -------------------------------------------------------------------------------------------------------


def test_a_tracker_that_fails_warns_once_and_training_goes_on() -> None:
    healthy = MemoryTracker()
    trackers = running(Failing("failing", "log", ConnectionResetError("the service hung up")), healthy)
    with pytest.warns(RuntimeWarning, match="'failing' failed in log.*the service hung up"):
        trackers.log({"loss": 1.0}, step=0)
    for step in (1, 2):
        trackers.log({"loss": 1.0}, step=step)  # silent: warnings are errors here
    assert [call[1] for call in healthy.calls[1:]] == [0, 1, 2]
    with pytest.warns(RuntimeWarning, match="failed in 3 calls"):
        trackers.finish()


def test_a_service_that_cannot_be_reached_is_left_out() -> None:
    healthy = MemoryTracker()
    error = RuntimeError("cannot start the run")
    error.__cause__ = TimeoutError("no answer")
    trackers = TrackerSet([Failing("unreachable", "start", error), healthy])
    with pytest.warns(RuntimeWarning, match="without the tracker 'unreachable'.*cannot start the run"):
        trackers.start("digits", {"rate": 0.1})
    trackers.get("unreachable").log({"loss": 1.0})  # ignored
    trackers.log({"loss": 1.0})
    trackers.finish()
    assert healthy.calls[-1] == "finish"
    assert trackers.active == [healthy]


def test_other_errors_at_the_start_are_errors() -> None:
    with pytest.raises(PermissionError, match="no key"):
        running(Failing("locked", "start", PermissionError("no key")))


@pytest.mark.parametrize("name", ["CommError", "ConnectTimeout", "MaxRetryError"])
def test_network_errors_of_libraries_are_known_by_name(name: str) -> None:
    error = type(name, (Exception,), {})("nobody there")
    assert is_network_failure(error)
    assert not is_network_failure(ValueError("bad key"))


def test_mistakes_of_the_program_are_errors_everywhere() -> None:
    trackers = TrackerSet(["local"])
    with pytest.raises(TypeError, match=r"log\(0\.5\) needs a dictionary"):
        trackers.log(0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="step='three' is not an integer"):
        trackers.log({}, step="three")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="log_kwargs=.*dictionary of dictionaries"):
        trackers.log({}, log_kwargs={"wandb": 3})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="init_kwargs="):
        trackers.start("digits", init_kwargs=["wandb"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="project_name=3"):
        trackers.start(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="project_name=None"):
        trackers.start(None)


def test_a_tracker_of_ones_own_takes_whatever_it_likes() -> None:
    tracker = MemoryTracker()
    trackers = TrackerSet([tracker])
    trackers.start(None, {"lr": 1})
    trackers.log(0.5, step="third")  # type: ignore[arg-type]
    assert tracker.calls[-1][:2] == (0.5, "third")
    trackers.finish()


def test_without_trackers_nothing_is_asked_of_what_is_logged() -> None:
    trackers = TrackerSet([])
    trackers.start(None)
    trackers.log(torch.ones(2), step=0.5)  # type: ignore[arg-type]
    trackers.finish()


def test_steps_of_other_types_become_integers() -> None:
    tracker = MemoryTracker()
    trackers = running(tracker)
    for step in (torch.tensor(3), 4.0, True):
        trackers.log({}, step=step)  # type: ignore[arg-type]
    assert [call[1] for call in tracker.calls[1:]] == [3, 4, 1]


def test_settings_that_are_no_dictionary_are_refused() -> None:
    with pytest.raises(TypeError, match="The config of a run must be a dictionary, not 3"):
        plain_settings(3)


def test_an_aborted_run_is_finished_by_trackers_that_know_no_better() -> None:
    tracker = MemoryTracker()
    tracker.abort("KeyError")
    assert tracker.calls == ["finish"]
