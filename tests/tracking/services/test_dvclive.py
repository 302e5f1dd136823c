"""DVCLive, read back from its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.tracking.services.running import LOSSES, crash, in_fresh_process, needs, some_image, train

pytestmark = [needs("dvclive"), pytest.mark.thorough]


def log(folder: str) -> None:
    accelerator = train("dvclive", folder, save_dvc_exp=False)
    tracker = accelerator.get_tracker("dvclive")
    tracker.log_images({"digits": some_image()}, step=6)
    accelerator.end_training()


def log_to_a_live_of_the_program(folder: str) -> None:
    from dvclive import Live

    live = Live(f"{folder}/theirs", save_dvc_exp=False)
    accelerator = train("dvclive", folder, live=live)
    assert accelerator.get_tracker("dvclive", unwrap=True) is live
    accelerator.end_training()


def curve(path: Path) -> list[tuple[int, float]]:
    rows = [line.split("\t") for line in path.read_text().splitlines()[1:]]
    return [(int(step), float(value)) for step, value in rows]


def test_what_was_logged_is_in_the_files(tmp_path: Path) -> None:
    in_fresh_process(log, tmp_path)
    folder = tmp_path / "dvclive"
    assert curve(folder / "plots" / "metrics" / "loss.tsv") == list(enumerate(LOSSES))
    assert curve(folder / "plots" / "metrics" / "group" / "b.tsv") == [(5, 2.5)]
    summary = json.loads((folder / "metrics.json").read_text())
    assert (summary["loss"], summary["note"], summary["nan"]) == (0.0625, "a text", "nan")
    settings = yaml.safe_load((folder / "params.yaml").read_text())
    assert (settings["model"], settings["nothing"]) == ({"name": "tiny", "widths": [8, 16]}, None)
    assert (folder / "plots" / "images" / "digits.png").is_file()


def test_an_object_of_the_program_is_used(tmp_path: Path) -> None:
    in_fresh_process(log_to_a_live_of_the_program, tmp_path)
    assert curve(tmp_path / "theirs" / "plots" / "metrics" / "loss.tsv") == list(enumerate(LOSSES))


def test_a_crash_keeps_what_was_logged(tmp_path: Path) -> None:
    in_fresh_process(crash, tmp_path, "dvclive", {"save_dvc_exp": False}, returncode=1)
    assert curve(tmp_path / "dvclive" / "plots" / "metrics" / "loss.tsv") == list(enumerate(LOSSES))
