"""MLflow with a database in a file, read back with its client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel_tracking.trackers.mlflow import MLflowTracker
from tests.tracking.services.running import LOSSES, crash, files_under, in_fresh_process, needs, some_image, train

needs_library = needs("mlflow")


def log(folder: str) -> None:
    accelerator = train("mlflow", folder, run_name="first", tags={"team": "vision"}, logging_dir=f"{folder}/kept")
    tracker = accelerator.get_tracker("mlflow")
    tracker.log_images({"digits": [some_image()]}, step=6)
    tracker.log_table("mistakes", columns=["id", "p"], data=[[1, 0.5], [2, 0.25]], step=7)
    Path(folder, "notes").mkdir()
    Path(folder, "notes", "notes.txt").write_text("kept")
    tracker.log_artifact(f"{folder}/notes/notes.txt", artifact_path="one")
    tracker.log_artifacts(f"{folder}/notes", artifact_path="all")
    import matplotlib.figure

    tracker.log_figure(matplotlib.figure.Figure(), "figure.png", dpi=20)
    with pytest.warns(UserWarning, match="'long'"):
        tracker.store_init_configuration({"long": "x" * 10_000, "short": "y"})
    accelerator.end_training()


def read(folder: str) -> dict[str, Any]:
    import mlflow

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    loss = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")]
    data, status = run.data, run.info.status
    return {"metrics": data.metrics, "settings": data.params, "tags": data.tags, "status": status, "loss": loss}


def store(folder: Path) -> dict[str, str]:
    return {
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/runs.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "GIT_PYTHON_REFRESH": "quiet",
    }


@needs_library
@pytest.mark.thorough
def test_what_was_logged_is_in_the_database(tmp_path: Path) -> None:
    in_fresh_process(log, tmp_path, MLFLOW_TAGS=json.dumps({"size": "small"}), **store(tmp_path))
    actual = in_fresh_process(read, tmp_path, **store(tmp_path))
    assert actual["loss"] == [[step, loss] for step, loss in enumerate(LOSSES)]
    assert actual["metrics"]["group/b"] == 2.5
    assert actual["metrics"]["top_1 ___"] == 50
    assert actual["metrics"]["nan"] != actual["metrics"]["nan"]
    assert actual["settings"]["learning_rate"] == "0.001"
    assert actual["settings"]["short"] == "y"
    assert "long" not in actual["settings"]
    assert {"team": "vision", "size": "small", "note": "a text", "mlflow.runName": "first"}.items() <= actual[
        "tags"
    ].items()
    assert actual["status"] == "FINISHED"
    kept = {path.name for path in files_under(str(tmp_path / "kept"), "*")}
    assert {"notes.txt", "figure.png", "mistakes_7.json"} <= kept


@needs_library
@pytest.mark.thorough
def test_a_crash_keeps_what_was_logged_and_is_marked(tmp_path: Path) -> None:
    in_fresh_process(crash, tmp_path, "mlflow", returncode=1, **store(tmp_path))
    actual = in_fresh_process(read, tmp_path, **store(tmp_path))
    assert [value for _, value in actual["loss"]] == LOSSES
    assert actual["status"] == "FAILED"


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EXPERIMENT_NAME": "theirs", "RUN_ID": "7", "NESTED_RUN": "true", "TAGS": '{"a": 1}'}.items():
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    tracker = MLflowTracker("mine", run_id="8", tags='{"b": 2}')
    assert (tracker.experiment_name, tracker.run_id, tracker.nested_run) == ("theirs", "7", True)
    assert tracker.tags == {"a": 1, "b": 2}


def test_tags_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tags='\[1\]' is not a dictionary of tags"):
        MLflowTracker("mine", tags="[1]")
