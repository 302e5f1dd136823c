"""ClearML in offline mode, read back from the session it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel_tracking.trackers.clearml import title_and_series
from tests.tracking.services.running import LOSSES, close_to, files_under, in_fresh_process, needs, some_image, train

needs_library = needs("clearml")


def go_offline() -> None:
    """Without a server, and without the process that reports to one: forked while `git` is started, it may hang."""
    from clearml import Task

    Task._report_subprocess_enabled = False
    Task.set_offline(True)


def log(folder: str) -> None:
    go_offline()
    accelerator = train("clearml", folder, auto_connect_frameworks=False, auto_resource_monitoring=False)
    accelerator.log({"best_loss": 0.0625})
    tracker = accelerator.get_tracker("clearml")
    tracker.log_images({"digits": some_image(), "several": [some_image(), some_image()]}, step=6)
    tracker.log_table("mistakes", columns=["id", "p"], data=[[1, 0.5], [2, 0.25]], step=7)
    Path(folder, "notes.txt").write_text("kept")
    tracker.log_artifact(Path(folder, "notes.txt"))
    accelerator.end_training()


def crash(folder: str) -> None:
    go_offline()
    train("clearml", folder, crash=True, auto_connect_frameworks=False, auto_resource_monitoring=False)


def log_to_a_task_of_the_program(folder: str) -> str:
    from clearml import Task

    go_offline()
    task = Task.init("theirs", "theirs", auto_connect_frameworks=False, auto_resource_monitoring=False)
    accelerator = train("clearml", folder)
    assert accelerator.get_tracker("clearml", unwrap=True) is task
    accelerator.end_training()
    return str(task.get_status())  # still open: whoever began it ends it


def read(folder: Path) -> dict[str, Any]:
    actual: dict[str, Any] = {"curves": {}, "console": "", "single": {}}
    for line in next(files_under(str(folder), "metrics.jsonl")).read_text().splitlines():
        for event in json.loads(line):
            if event["type"] == "training_stats_scalar":
                name = (event["metric"], event["variant"])
                actual["curves"].setdefault("/".join(name), []).append((event["iter"], event["value"]))
            actual.setdefault("kinds", set()).add(event["type"])
    for path in files_under(str(folder), "log.jsonl"):
        actual["console"] += path.read_text()
    actual["task"] = json.loads(next(files_under(str(folder), "task.json")).read_text())
    return actual


@needs_library
@pytest.mark.thorough
def test_what_was_logged_is_in_the_session(tmp_path: Path) -> None:
    in_fresh_process(log, tmp_path)
    actual = read(tmp_path)
    assert actual["curves"]["loss/train"] == list(enumerate(LOSSES))
    assert close_to(value for _, value in actual["curves"]["accuracy/train"]) == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert "nan/train" not in actual["curves"]
    assert "note (step 5): a text" in actual["console"]
    assert "nan (step 5): NaN" in actual["console"]
    assert actual["task"]["name"] == "digits"
    assert "tiny" in actual["task"]["configuration"]["General"]["value"]
    assert [artifact["key"] for artifact in actual["task"]["execution"]["artifacts"]] == ["notes.txt"]
    assert len(list(files_under(str(tmp_path), "*.jpeg"))) == 3
    assert "plot" in actual["kinds"]


@needs_library
@pytest.mark.thorough
def test_a_crash_keeps_what_was_logged(tmp_path: Path) -> None:
    in_fresh_process(crash, tmp_path, returncode=1)
    assert read(tmp_path)["curves"]["loss/train"] == list(enumerate(LOSSES))


@needs_library
@pytest.mark.thorough
def test_a_task_that_the_program_began_is_used_and_left_open(tmp_path: Path) -> None:
    assert in_fresh_process(log_to_a_task_of_the_program, tmp_path) not in ("closed", "completed")
    assert read(tmp_path)["task"]["name"] == "theirs"


def test_curves_of_one_metric_share_a_plot() -> None:
    assert title_and_series("eval_loss") == ("loss", "eval")
    assert title_and_series("train_top_1") == ("top_1", "train")
    assert title_and_series("loss") == ("loss", "train")
    assert title_and_series("test_") == ("test_", "train")
