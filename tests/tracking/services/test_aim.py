"""Aim, read back from its repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tracking.services.running import LOSSES, crash, in_fresh_process, needs, some_image, train

pytestmark = [needs("aim"), pytest.mark.thorough]


def log(folder: str) -> None:
    accelerator = train("aim", folder, system_tracking_interval=None)
    tracker = accelerator.get_tracker("aim")
    tracker.log_images({"one": (some_image(), "a digit"), "several": [some_image(), some_image()]}, step=6)
    tracker.log_images(
        {"small": some_image()},
        step=6,
        kwargs={"aim_image": {"quality": 50}, "track": {"context": {"subset": "test"}}},
    )
    accelerator.end_training()


def read(folder: str) -> dict[str, Any]:
    from aim import Repo, Run
    from aim.storage.context import Context

    def describe(values: Any) -> Any:
        if isinstance(values, (list, tuple)):
            return [describe(value) for value in values]
        return values.data if hasattr(values, "data") and isinstance(values.data, str) else values.caption

    repository = Repo(folder)
    (name,) = repository.list_all_runs()
    run = Run(name, repo=repository, system_tracking_interval=None, capture_terminal_logs=False)
    actual = {
        "name": run.name,
        "settings": run.get("hparams"),
        "metrics": {metric.name: sorted(metric.values.sparse_list()[1], reverse=True) for metric in run.metrics()},
        "texts": {name: run.get_text_sequence(name, Context({})) for name in ("note", "nan (not finite)")},
        "images": {name: run.get_image_sequence(name, Context({})) for name in ("one", "several")},
    }
    for kind in ("texts", "images"):
        for name, sequence in actual[kind].items():
            actual[kind][name] = describe(sequence.values.sparse_list()[1]) if sequence is not None else []
    run.close()
    return actual


def test_what_was_logged_is_in_the_repository(tmp_path: Path) -> None:
    in_fresh_process(log, tmp_path)
    actual = in_fresh_process(read, tmp_path)
    assert actual["name"] == "digits"
    assert actual["settings"]["model"] == {"name": "tiny", "widths": [8, 16]}
    assert actual["metrics"]["loss"] == LOSSES
    assert actual["metrics"]["group/a"] == [1.0]
    assert actual["texts"]["note"] == ["a text"]
    assert actual["texts"]["nan (not finite)"] == ["NaN"]
    assert actual["images"] == {"one": ["a digit"], "several": [["", ""]]}


def test_a_crash_keeps_what_was_logged(tmp_path: Path) -> None:
    in_fresh_process(crash, tmp_path, "aim", {"system_tracking_interval": None}, returncode=1)
    assert in_fresh_process(read, tmp_path)["metrics"]["loss"] == LOSSES
