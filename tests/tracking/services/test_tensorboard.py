"""TensorBoard, read back from its event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tracking.services.running import LOSSES, crash, files_under, in_fresh_process, needs, some_image, train

pytestmark = needs("tensorboard")


def log(folder: str) -> None:
    accelerator = train("tensorboard", folder)
    tracker = accelerator.get_tracker("tensorboard")
    tracker.log_images({"digits": some_image()[None]}, step=2, dataformats="NHWC")
    assert accelerator.get_tracker("tensorboard", unwrap=True) is tracker.writer
    accelerator.end_training()


def read(folder: str) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    actual: dict[str, Any] = {"scalars": {}, "images": [], "tensors": []}
    for path in files_under(folder, "events.out.tfevents.*"):
        events = EventAccumulator(str(path))
        events.Reload()
        tags = events.Tags()
        for tag in tags["scalars"]:
            actual["scalars"][tag] = [(event.step, event.value) for event in events.Scalars(tag)]
        actual["images"] += tags["images"]
        actual["tensors"] += tags["tensors"]
        actual.setdefault("plugins", []).extend(events.summary_metadata)
    actual["hparams"] = [path.read_text() for path in files_under(folder, "hparams.yml")]
    return actual


@pytest.mark.takes_turns
def test_what_was_logged_is_in_the_event_files(tmp_path: Path) -> None:
    in_fresh_process(log, tmp_path)
    actual = in_fresh_process(read, tmp_path)
    scalars = actual["scalars"]
    assert [step for step, _ in scalars["loss"]] == list(range(5))
    assert [value for _, value in scalars["loss"]] == LOSSES
    assert [value for _, value in scalars["train_accuracy"]] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert {"group", "nan", "inf"} <= set(scalars)
    assert any(name.startswith("digits") for name in actual["images"])
    assert {"note/text_summary", "thing/text_summary", "many/text_summary"} <= set(actual["tensors"])
    assert (tmp_path / "digits").is_dir()
    import yaml

    assert yaml.safe_load(actual["hparams"][0])["model"] == {"name": "tiny", "widths": [8, 16]}


@pytest.mark.takes_turns
def test_a_crash_keeps_what_was_logged(tmp_path: Path) -> None:
    in_fresh_process(crash, tmp_path, "tensorboard", returncode=1)
    assert len(in_fresh_process(read, tmp_path)["scalars"]["loss"]) == 5
