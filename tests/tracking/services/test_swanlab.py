"""SwanLab in offline mode, read back from the files of its run."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tracking.services.running import LOSSES, crash, files_under, in_fresh_process, needs, some_image, train

pytestmark = [needs("swanlab"), pytest.mark.thorough]


def log(folder: str) -> None:
    accelerator = train("swanlab", folder, mode="offline", log_dir=f"{folder}/logs")
    accelerator.get_tracker("swanlab").log_images({"digits": [some_image()]}, step=6)
    accelerator.end_training()


def read(folder: Path) -> dict[str, Any]:
    record = next(files_under(str(folder), "*.swanlab")).read_bytes()
    settings = next(files_under(str(folder), "config.yaml"))
    return {"record": record, "settings": yaml.safe_load(settings.read_text())}


def test_what_was_logged_is_in_the_record(tmp_path: Path) -> None:
    in_fresh_process(log, tmp_path)
    actual = read(tmp_path)
    assert actual["settings"]["model"]["value"] == {"name": "tiny", "widths": [8, 16]}
    assert actual["settings"]["FRAMEWORK"]["value"] == "Accelerate"
    for loss in LOSSES:
        assert struct.pack("<d", loss) in actual["record"] or struct.pack("<f", loss) in actual["record"]
    for name in (b"loss", b"train_accuracy", b"group/a", b"nan", b"digits"):
        assert name in actual["record"]
    texts = {path.read_text() for path in files_under(str(tmp_path), "*.txt") if path.parent.name == "text"}
    assert "a text" in texts
    assert any(text.startswith("<object object") for text in texts)
    assert len(list(files_under(str(tmp_path / "logs"), "*.png"))) == 1


def test_a_crash_keeps_what_was_logged(tmp_path: Path) -> None:
    in_fresh_process(crash, tmp_path, "swanlab", {"mode": "offline", "log_dir": f"{tmp_path}/logs"}, returncode=1)
    record = read(tmp_path)["record"]
    assert all(struct.pack("<d", loss) in record or struct.pack("<f", loss) in record for loss in LOSSES)
