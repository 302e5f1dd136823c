"""The tracker that writes files of its own: what it keeps, what a crash leaves, how it is read."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_tracking.local import record as record_module
from accel_tracking.local.reading import Run, find_runs, read_run, read_runs
from accel_tracking.local.record import FILE, FOLDER, Record
from accel_tracking.tracker_set import TrackerSet
from accel_tracking.trackers.local import LocalTracker
from tests.support.ranks import ranks


def started(folder: Path, **arguments: Any) -> LocalTracker:
    tracker = LocalTracker("digits", folder, **arguments)
    tracker.start()
    return tracker


def the_run(folder: Path) -> Run:
    (run,) = read_runs(folder)
    return run


# ---- what is kept ---------------------------------------------------------------------------------------------------


def test_a_run_is_read_back_as_it_was_logged(tmp_path: Path) -> None:
    @dataclass
    class Model:
        width: int = 8

    tracker = started(tmp_path, notes="first try")
    tracker.store_init_configuration({"rate": 1e-3, "model": Model(), "path": tmp_path, "odd": object(), 3: {1, 2}})
    for step in range(3):
        tracker.log({"loss": 1 / (step + 1)}, step=step)
    tracker.log({"accuracy": torch.tensor(0.5), "group": {"a": 1, "b": torch.tensor([2.0])}, "note": "fine"}, step=3)
    tracker.finish()
    run = the_run(tmp_path)
    assert (run.name, run.status, run.reason, run.last_step) == ("digits", "finished", None, 3)
    assert run.settings["model"] == {"width": 8}
    assert run.settings["path"] == str(tmp_path)
    assert run.settings["3"] == [1, 2]
    assert run.settings["odd"].startswith("<object")
    assert (run.metrics["loss"].steps, run.metrics["loss"].values) == ([0, 1, 2], [1.0, 0.5, 1 / 3])
    assert {name: run.metrics[name].last for name in ("accuracy", "group/a", "group/b")} == {
        "accuracy": 0.5, "group/a": 1, "group/b": 2.0,
    }  # fmt: skip
    assert run.texts == {"note": "fine"}
    assert run.facts["notes"] == "first try"
    assert run.num_damaged == 0


def test_what_json_cannot_hold_is_coerced_and_never_fatal(tmp_path: Path) -> None:
    itself: dict[str, Any] = {"loss": 1.0}
    itself["itself"] = itself

    class Silent:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    tracker = started(tmp_path)
    tracker.log({"nan": math.nan, "inf": math.inf, "low": -math.inf}, step=0)
    tracker.log(itself, step=1)
    tracker.log({"silent": Silent(), "many": torch.ones(100, 100), ("a", 1): 2, "": 3, "broken \ud800": 4}, step=2)
    tracker.log({"flag": True, "whole": 7}, step=3)
    tracker.finish()
    run = the_run(tmp_path)
    assert math.isnan(run.metrics["nan"].last)
    assert (run.metrics["inf"].last, run.metrics["low"].last) == (math.inf, -math.inf)
    assert run.metrics["loss"].last == 1.0
    assert "__str__ failed" in run.texts["silent"]
    assert run.texts["many"] == "Tensor of shape (100, 100), torch.float32"
    assert (run.metrics["('a', 1)"].last, run.metrics[""].last) == (2, 3)
    assert (run.metrics["flag"].last, run.metrics["whole"].last) == (1.0, 7)
    assert run.num_damaged == 0
    for line in (run.folder / FILE).read_bytes().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # plain JSON: no NaN, no Infinity


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.text(max_size=5), st.floats() | st.integers(-(2**60), 2**60) | st.booleans(), max_size=4),
        max_size=6,
    )
)
def test_any_numbers_come_back(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, float]]) -> None:
    folder = tmp_path_factory.mktemp("runs")
    tracker = started(folder)
    for step, row in enumerate(rows):
        tracker.log(row, step=step)
    tracker.finish()
    run = the_run(folder)
    expected: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            expected.setdefault(name.encode(errors="replace").decode(), []).append(value)
    assert list(run.metrics) == list(expected)
    for name, values in expected.items():
        got = run.metrics[name].values
        assert all(math.isnan(a) and math.isnan(b) or a == b for a, b in zip(got, values, strict=True))


def test_steps_are_counted_where_none_are_given(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.log({"loss": 1.0})
    tracker.log({"loss": 0.5}, step=7)
    tracker.log({"loss": 0.25})
    tracker.finish()
    assert the_run(tmp_path).metrics["loss"].steps == [0, 7, 8]


def test_images_tables_and_files_are_kept(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.log_images(
        {"gray": torch.rand(5, 4), "first": torch.rand(3, 5, 4), "last": [(torch.rand(5, 4, 3) * 255).byte()] * 2},
        step=1,
    )
    tracker.log_table("mistakes", columns=["id", "p"], data=[[1, 0.5], [2, math.nan]], step=2)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    tracker.log_artifact(tmp_path / "model")
    tracker.log_artifact(tmp_path / "model" / "config.json", "settings/config.json")
    tracker.finish()
    run = the_run(tmp_path)
    for shown in run.images.values():
        for _, file in shown:
            data = (run.folder / file).read_bytes()
            assert data.startswith(b"\x89PNG")
            assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (4, 5)
    assert len(run.images["last"]) == 2
    assert run.tables["mistakes"] == {"step": 2, "columns": ["id", "p"], "data": [[1, 0.5], [2, "NaN"]]}
    assert run.artifacts == ["artifacts/model", "artifacts/settings/config.json"]
    assert (run.folder / "artifacts" / "model" / "config.json").is_file()


def test_mistakes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run_id='\.\./x' cannot be the name of a folder"):
        LocalTracker("digits", tmp_path, run_id="../x")
    tracker = started(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="leads out of the run's folder"):
        tracker.log_artifact(tmp_path / "file", "../../file")
    with pytest.raises(ValueError, match=r"An image of shape \(2, 3, 4, 5, 6\)"):
        tracker.log_images({"x": [torch.rand(2, 3, 4, 5, 6)]})
    with pytest.raises(TypeError, match="it takes none"):
        tracker.log({"loss": 1.0}, step=0, commit=True)
    tracker.finish()


# ---- crashes --------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, log_with="local", project_dir=sys.argv[1])
accelerator.init_trackers("digits", config={"rate": 0.1})
for step in range(100):
    accelerator.log({"loss": 1.0 / (step + 1)}, step=step)
"""


def crashed(folder: Path, ending: str) -> tuple[int, Run]:
    words = [sys.executable, "-c", PROGRAM + ending, str(folder)]
    done = subprocess.run(words, capture_output=True, check=False, timeout=300)
    return done.returncode, the_run(folder)


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("ending", "returncode", "status", "reason"),
    [
        ("raise KeyError('mine')", 1, "failed", "KeyError: 'mine'"),
        ("sys.exit(0)", 0, "finished", None),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM, "terminated", "SIGTERM"),
    ],
    ids=["error", "forgotten end", "SIGTERM"],
)
def test_an_end_of_any_kind_loses_nothing(
    tmp_path: Path, ending: str, returncode: int, status: str, reason: str | None
) -> None:
    code, run = crashed(tmp_path, ending)
    assert (code, run.status, run.reason) == (returncode, status, reason)
    assert run.metrics["loss"].steps == list(range(100))


@pytest.mark.takes_turns
def test_sigterm_in_the_middle_of_a_call_that_holds_a_lock(tmp_path: Path) -> None:
    locked = """
from accel_tracking import tracker_set
tracker_set.SECONDS_TO_FLUSH = 0.5
tracker = accelerator.get_tracker("local")
tracker.lock = __import__("threading").Lock()
def abort(reason):
    with tracker.lock:
        pass
tracker.abort = abort
with tracker.lock:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""
    code, run = crashed(tmp_path, locked)
    assert code == -signal.SIGTERM
    assert len(run.metrics["loss"].steps) == 100  # written long before


@pytest.mark.takes_turns
def test_a_killed_process_loses_only_what_was_not_yet_handed_to_the_disk(tmp_path: Path) -> None:
    waited = """
path = accelerator.get_tracker("local").folder / "record.jsonl"
deadline = time.monotonic() + 60
while path.read_bytes().count(b"\\n") < 102 and time.monotonic() < deadline:
    time.sleep(0.001)
os.kill(os.getpid(), signal.SIGKILL)
"""
    code, run = crashed(tmp_path, waited)
    assert (code, run.status) == (-signal.SIGKILL, "lost")
    assert run.metrics["loss"].steps == list(range(100))


@pytest.mark.takes_turns
def test_a_forked_process_dies_of_sigterm_as_ever(tmp_path: Path) -> None:
    forks = """
ready, told = os.pipe()
child = os.fork()
if child == 0:
    os.write(told, b"x")
    time.sleep(60)
    os._exit(1)
os.read(ready, 1)  # what comes before the child runs Python is lost: CPython forgets it
os.kill(child, signal.SIGTERM)
assert os.waitpid(child, 0)[1] == signal.SIGTERM
accelerator.log({"loss": 0.0}, step=100)
accelerator.end_training()
"""
    code, run = crashed(tmp_path, forks)
    assert (code, run.status, run.last_step) == (0, "finished", 100)


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 400))
def test_a_record_torn_anywhere_is_read_up_to_there(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("runs")
    tracker = started(folder)
    for step in range(20):
        tracker.log({"loss": float(step)}, step=step)
    tracker.finish()
    path = tracker.folder / FILE
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - cut])
    run = read_run(tracker.folder)
    steps = run.metrics["loss"].steps if "loss" in run.metrics else []
    lines = whole[: len(whole) - cut].count(b'"loss"') - 1
    assert steps == list(range(len(steps)))
    assert len(steps) >= lines


def test_damage_in_the_middle_costs_only_the_damaged_lines(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    for step in range(10):
        tracker.log({"loss": float(step)}, step=step)
    tracker.finish()
    path = tracker.folder / FILE
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = b"\0" * len(lines[4]) + b"\n"  # a block that never reached the disk
    lines[6] = b'{"step": 5, "time": "never", "values": {"loss": 1}}\n'
    lines[7] = b"[1, 2]\n"
    path.write_bytes(b"".join(lines))
    run = read_run(tracker.folder)
    assert run.num_damaged == 2
    assert run.metrics["loss"].steps[:3] == [0, 1, 2]
    assert run.status == "finished"


def test_a_run_is_continued_after_a_torn_line(tmp_path: Path) -> None:
    first = started(tmp_path, run_id="mine")
    for step in range(10):
        first.log({"loss": float(step), "rate": 0.1}, step=step)
    first.finish()
    path = first.folder / FILE
    path.write_bytes(path.read_bytes()[:-5])
    second = started(tmp_path, run_id="mine")
    for step in range(6, 8):  # from the checkpoint of step 5
        second.log({"loss": -float(step)}, step=step)
    second.finish()
    run = the_run(tmp_path)
    assert (run.id, run.status) == ("mine", "finished")
    assert run.metrics["loss"].values == [0, 1, 2, 3, 4, 5, -6, -7]
    assert len(run.metrics["rate"].values) == 10


def test_a_full_disk_is_told_once_and_later_lines_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = started(tmp_path)
    trackers = TrackerSet([tracker])
    trackers.active.append(tracker)
    real, failed = os.write, threading.Event()

    def full(descriptor: int, data: Any) -> int:
        if b'"full"' in bytes(data):
            real(descriptor, bytes(data)[:10])
            failed.set()
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(record_module, "write", full)
    trackers.log({"full": 1.0}, step=0)
    assert failed.wait(60)
    log_until_told = partial(iter, lambda: (trackers.log({"loss": 0.5}, step=1), len(trackers._num_failures))[1], 1)
    with pytest.warns(RuntimeWarning, match="'local' failed in log.*No space left"):
        list(log_until_told())  # until the thread has passed the error on
    tracker.finish()
    run = the_run(tmp_path)
    assert run.metrics["loss"].last == 0.5
    assert "full" not in run.metrics


def test_several_threads_may_log(tmp_path: Path) -> None:
    tracker = started(tmp_path)

    def log(name: str) -> None:
        for step in range(200):
            tracker.log({name: step}, step=step)

    threads = [threading.Thread(target=log, args=(f"m{place}",)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracker.finish()
    assert [len(series.steps) for series in the_run(tmp_path).metrics.values()] == [200] * 4


def test_syncs_can_be_spaced_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[int] = []
    monkeypatch.setattr(record_module, "sync", syncs.append)
    record = Record(tmp_path / "record.jsonl", sync_seconds=1000.0)
    for number in range(50):
        record.append(str(number))
    record.close()
    record.close()
    assert (tmp_path / "record.jsonl").read_text().split() == [str(number) for number in range(50)]
    assert 1 <= len(syncs) <= 2  # the first one, and the one at the end


# ---- finding and telling --------------------------------------------------------------------------------------------


def test_runs_are_found_below_a_folder_the_newest_first(tmp_path: Path) -> None:
    for place, name in enumerate(("b", "a")):
        tracker = started(tmp_path / "deep" / "down", run_id=name)
        tracker.finish()
        path = tracker.folder / FILE
        lines = path.read_text().splitlines()
        lines[0] = json.dumps(json.loads(lines[0]) | {"time": 1000.0 + place})
        path.write_text("\n".join(lines) + "\n")
    (tmp_path / ".hidden" / FOLDER / "x").mkdir(parents=True)
    (tmp_path / ".hidden" / FOLDER / "x" / FILE).touch()
    assert [run.id for run in read_runs(tmp_path)] == ["a", "b"]
    assert find_runs(tmp_path / "deep" / "down" / FOLDER / "a") == [tmp_path / "deep" / "down" / FOLDER / "a"]
    assert find_runs(tmp_path / "nothing") == []


def test_a_run_that_goes_on_is_told_from_one_that_was_lost(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.log({"loss": 1.0}, step=0)
    assert tracker.record is not None
    tracker.record.close()  # all is written, but not that it ended
    path = tracker.folder / FILE
    first, _, rest = path.read_text().partition("\n")
    for change, status in (
        ({}, "running"),
        ({"pid_started": "1"}, "lost"),  # another process has the number now
        ({"host": "elsewhere"}, "running"),  # heard of just now
    ):
        path.write_text(f"{json.dumps(json.loads(first) | change)}\n{rest}")
        assert the_run(tmp_path).status == status


@ranks(2)
def test_only_the_main_process_writes(rank: int, world: int, tmp_path: Path) -> None:
    trackers = TrackerSet(["local"], logging_dir=tmp_path)
    trackers.start("digits", {"rate": 0.1})
    trackers.log({"loss": 1.0}, step=0)
    trackers.finish()
    with contextlib.suppress(FileNotFoundError):
        assert len(find_runs(tmp_path)) <= 1
    if rank == 0:
        assert the_run(tmp_path).facts["processes"] == 2


def test_reading_loads_no_torch() -> None:
    program = (
        "import sys, accel_tracking.local.reading, accel_tracking.local.page, accel_tracking.local.comparing;"
        "print([m for m in ('torch', 'numpy', 'tqdm') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "[]"
