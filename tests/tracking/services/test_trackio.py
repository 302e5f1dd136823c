"""Trackio with its store in a folder, read back through its storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tracking.services.running import LOSSES, crash, in_fresh_process, needs, some_image, train

pytestmark = [needs("trackio"), pytest.mark.thorough]


def log(folder: str) -> None:
    accelerator = train("trackio", folder, embed=False, name="first")
    tracker = accelerator.get_tracker("trackio")
    tracker.log_images({"digits": [some_image()]}, step=6)
    tracker.log_table("mistakes", columns=["id", "p"], data=[[1, 0.5], [2, 0.25]], step=7)
    Path(folder, "notes.txt").write_text("kept")
    tracker.log_artifact(Path(folder, "notes.txt"), "notes", type="text")
    accelerator.log({"step": 8.5, "time": 1.0}, step=8)  # names of its own columns
    accelerator.end_training()


def read(folder: str) -> dict[str, Any]:
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("digits")
    rows = SQLiteStorage.get_logs("digits", name)
    return {"name": name, "rows": rows, "config": SQLiteStorage.get_run_config("digits", name)}


def store(folder: Path) -> dict[str, str]:
    return {"TRACKIO_DIR": str(folder / "store"), "HF_HUB_OFFLINE": "1"}


def test_what_was_logged_is_in_the_store(tmp_path: Path) -> None:
    in_fresh_process(log, tmp_path, **store(tmp_path))
    actual = in_fresh_process(read, tmp_path, **store(tmp_path))
    assert actual["name"] == "first"
    assert actual["config"]["model"] == {"name": "tiny", "widths": [8, 16]}
    rows = {row["step"]: row for row in actual["rows"]}
    assert [rows[step]["loss"] for step in range(5)] == LOSSES
    assert rows[5]["group"] == {"a": 1, "b": 2.5}
    assert rows[5]["note"] == "a text"
    assert rows[5]["thing"].startswith("<object object")
    assert rows[5]["nan"] != rows[5]["nan"]  # NaN
    assert rows[6]["digits/0"]["_type"] == "trackio.image"
    assert rows[7]["mistakes"]["_value"] == [{"id": 1, "p": 0.5}, {"id": 2, "p": 0.25}]
    assert (rows[8]["step_"], rows[8]["time_"]) == (8.5, 1.0)


def test_a_crash_keeps_what_was_logged(tmp_path: Path) -> None:
    in_fresh_process(crash, tmp_path, "trackio", {"embed": False}, returncode=1, **store(tmp_path))
    assert [row["loss"] for row in in_fresh_process(read, tmp_path, **store(tmp_path))["rows"]] == LOSSES
