"""Trackers of a user's own: conformance, choice by instance or name, and their life in a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accel_state.enums import LoggerType
from accel_state.processes import PartialState
from accel_tracking.registry import (
    LOGGER_TYPE_TO_CLASS,
    SERVICES,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
)
from accel_tracking.tracker import GeneralTracker, on_main_process
from accel_tracking.tracker_set import TrackerSet
from tests.support.ranks import ranks
from tests.tracking.memory_tracker import MemoryTracker


class FolderTracker(MemoryTracker):
    name = "folder"
    requires_logging_directory = True

    def __init__(self, run: str, folder: str, **settings: Any) -> None:
        super().__init__(run, folder=folder, **settings)


class BrokenTracker(MemoryTracker):
    name = "broken"

    def finish(self) -> None:
        raise OSError("disk full")


@pytest.fixture
def registered() -> Iterator[None]:
    before = dict(LOGGER_TYPE_TO_CLASS)
    register_tracker_class(MemoryTracker)
    register_tracker_class(FolderTracker)
    yield
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(before)


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


def test_registered_classes_are_found_by_name(registered: None) -> None:
    assert get_available_trackers() == ["memory", "folder"]
    assert filter_trackers("memory") == ["memory"]
    assert filter_trackers(LoggerType.ALL, logging_dir="logs") == ["memory", "folder"]
    assert filter_trackers(["all", "memory"], logging_dir="logs") == ["memory", "folder"]


def test_a_class_that_needs_a_folder_says_so(registered: None) -> None:
    with pytest.raises(ValueError, match=r"log_with='folder'.*project_dir"):
        filter_trackers("folder")


@pytest.mark.parametrize("service", SERVICES)
def test_services_of_later_releases_are_refused_by_name(service: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"log_with='{service}'.*not part of this release yet"):
        filter_trackers(service)
    with pytest.raises(NotImplementedError, match=service):
        filter_trackers(LoggerType(service))


@pytest.mark.parametrize("wrong", ["tensorbord", 3, object()])
def test_what_is_no_tracker_is_refused_with_its_value(wrong: object) -> None:
    with pytest.raises(ValueError, match="is not a tracker") as caught:
        filter_trackers([wrong])
    assert repr(wrong) in str(caught.value)


def test_a_class_instead_of_an_instance_gets_a_hint() -> None:
    with pytest.raises(ValueError, match=r"Pass an instance: MemoryTracker\(\.\.\.\)"):
        filter_trackers(MemoryTracker)


def test_only_named_tracker_classes_can_be_registered() -> None:
    with pytest.raises(ValueError, match="subclass of GeneralTracker"):
        register_tracker_class(dict)  # type: ignore[arg-type]

    class Nameless(GeneralTracker):
        pass

    with pytest.raises(ValueError, match="Nameless.*name=None"):
        register_tracker_class(Nameless)


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
    trackers = TrackerSet([MemoryTracker()])
    trackers.get("anything").log({"loss": 1.0})  # nothing started yet: a tracker that ignores all
    trackers.start("digits")
    with pytest.raises(ValueError, match=r"no tracker 'wandb'.*'memory'"):
        trackers.get("wandb")


def test_one_failing_tracker_does_not_keep_others_from_finishing() -> None:
    first, last = MemoryTracker(), MemoryTracker()
    trackers = TrackerSet([first, BrokenTracker(), last])
    trackers.start("digits")
    with pytest.raises(OSError, match="disk full"):
        trackers.finish()
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
