"""Comet without a network, read back from the archive it writes."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.tracking.services.running import LOSSES, crash, files_under, in_fresh_process, needs, some_image, train

pytestmark = [needs("comet_ml"), pytest.mark.thorough]


def log(folder: str) -> None:
    accelerator = train("comet_ml", folder, online=False)
    tracker = accelerator.get_tracker("comet_ml")
    tracker.log_images({"digits": [some_image()]}, step=6)
    tracker.log_table("mistakes", columns=["id", "p"], data=[[1, 0.5], [2, 0.25]], step=7)
    Path(folder, "notes.txt").write_text("kept")
    tracker.log_artifact(Path(folder, "notes.txt"))
    accelerator.end_training()


def read(folder: Path) -> dict[str, Any]:
    actual: dict[str, Any] = {"metrics": {}, "settings": {}, "others": {}, "files": []}
    with zipfile.ZipFile(next(files_under(str(folder), "*.zip"))) as archive:
        for line in archive.read("messages.json").decode().splitlines():
            payload = json.loads(line)["payload"]
            if "metric" in payload:
                metric = payload["metric"]
                actual["metrics"].setdefault(metric["metricName"], []).append((metric["step"], metric["metricValue"]))
            elif setting := payload.get("param") or payload.get("params"):
                actual["settings"][setting["paramName"]] = setting["paramValue"]
            elif "key" in payload and "value" in payload:
                actual["others"][payload["key"]] = payload["value"]
            elif "additional_params" in payload:
                parameters = payload["additional_params"]
                actual["files"].append(parameters.get("fileName") or parameters.get("figName"))
    return actual


def test_what_was_logged_is_in_the_archive(tmp_path: Path) -> None:
    in_fresh_process(log, tmp_path)
    actual = read(tmp_path)
    assert actual["metrics"]["loss"] == list(enumerate(LOSSES))
    assert actual["metrics"]["group/b"] == [(5, 2.5)]
    assert actual["metrics"]["nan"] == [(5, "NaN")]
    assert actual["metrics"]["top@1 (%)"] == [(5, 50)]
    assert actual["settings"]["learning_rate"] == 1e-3
    assert actual["settings"]["model|name"] == "tiny"
    assert actual["others"]["note"] == "a text"
    assert {"digits", "mistakes.csv", "notes.txt"} <= set(actual["files"])


def test_a_crash_keeps_what_was_logged(tmp_path: Path) -> None:
    in_fresh_process(crash, tmp_path, "comet_ml", {"online": False}, returncode=1)
    assert read(tmp_path)["metrics"]["loss"] == list(enumerate(LOSSES))
