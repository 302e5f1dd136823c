"""Weights & Biases in offline mode, read back from its log of records."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tracking.services.running import LOSSES, crash, files_under, in_fresh_process, needs, some_image, train

pytestmark = [needs("wandb"), pytest.mark.thorough]

OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}


def log(folder: str) -> None:
    accelerator = train("wandb", folder, name="first", tags=["small"])
    tracker = accelerator.get_tracker("wandb")
    tracker.log_images({"digits": [some_image()]}, step=6)
    tracker.log_table("mistakes", columns=["id", "p"], data=[[1, 0.5], [2, 0.25]], step=7)
    Path(folder, "notes.txt").write_text("kept")
    tracker.log_artifact(Path(folder, "notes.txt"), "notes", type="text")
    accelerator.end_training()


def read(folder: str) -> dict[str, Any]:
    from wandb.proto import wandb_internal_pb2

    actual: dict[str, Any] = {"rows": [], "config": {}}
    for payload in records(next(files_under(folder, "*.wandb")).read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = record.history.item
            actual["rows"].append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
        elif kind == "config":
            actual["config"] |= {
                i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.config.update
            }
        elif kind == "run":
            actual["project"], actual["name"] = record.run.project, record.run.display_name
            actual["config"] |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
        elif kind == "exit":
            actual["exit"] = record.exit.exit_code
        elif kind == "artifact":
            actual["artifact"] = record.artifact.name
    return actual


def records(data: bytes) -> Iterator[bytes]:
    """The payloads of a file of records, which come in blocks of 32 KiB like LevelDB's."""
    place, block, whole = 7, 32768, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def test_what_was_logged_is_in_the_offline_run(tmp_path: Path) -> None:
    in_fresh_process(log, tmp_path, **OFFLINE)
    actual = in_fresh_process(read, tmp_path)
    assert (actual["project"], actual["name"], actual["exit"]) == ("digits", "first", 0)
    assert actual["config"]["learning_rate"] == 1e-3
    assert actual["config"]["model"] == {"name": "tiny", "widths": [8, 16]}
    rows = {row["_step"]: row for row in actual["rows"]}
    assert [rows[step]["loss"] for step in range(5)] == LOSSES
    assert round(rows[4]["train_accuracy"], 6) == 0.4
    assert (rows[5]["group/a"], rows[5]["group/b"], rows[5]["note"]) == (1, 2.5, "a text")
    assert rows[5]["thing"].startswith("<object object")
    assert rows[5]["nan"] != rows[5]["nan"]  # NaN
    assert any(name.startswith("digits") for name in rows[6])
    assert any(name.startswith("mistakes") for name in rows[7])
    assert actual["artifact"] == "notes"


def test_a_crash_keeps_what_was_logged_and_is_marked(tmp_path: Path) -> None:
    in_fresh_process(crash, tmp_path, "wandb", returncode=1, **OFFLINE)
    actual = in_fresh_process(read, tmp_path)
    assert [row["loss"] for row in actual["rows"]] == LOSSES
    assert actual["exit"] == 1
