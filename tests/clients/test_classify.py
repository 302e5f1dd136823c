"""A whole script as client libraries show them, started by `accelerate launch`, stopped and gone on with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "classify.py"


def launch(output: Path, *options: str) -> dict[str, Any]:
    """Run the script on two processes; what it found."""
    accelerate = Path(sys.executable).with_name("accelerate")
    command = [str(accelerate), "launch", "--cpu", "--num_processes", "2", str(SCRIPT), "--output_dir", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert run.returncode == 0, run.stderr
    return json.loads((output / "all_results.json").read_text())


@pytest.mark.thorough
@pytest.mark.launch
def test_a_script_goes_on_amid_an_epoch_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    pytest.importorskip("tensorboard")
    whole = launch(tmp_path / "whole", "--checkpointing_steps", "4", "--with_tracking")
    # 109 sentences in batches of 2 x 4 are 14 batches, and two to a step make 7 steps: 21 in three epochs
    assert (whole["steps"], whole["samples"], whole["lr"]) == (21, 21, 0.0)
    folders = sorted(path.name for path in (tmp_path / "whole").glob("step_*"))
    assert folders == ["step_12", "step_16", "step_20", "step_4", "step_8"]
    resumed = launch(tmp_path / "resumed", "--resume_from_checkpoint", str(tmp_path / "whole" / "step_12"))
    assert resumed["accuracy"] == whole["accuracy"]
    assert resumed["loss"] == whole["loss"]
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    found = load_file(tmp_path / "resumed" / "model.safetensors")
    assert expected.keys() == found.keys()
    assert all((found[name] == tensor).all() for name, tensor in expected.items())
    check_logged(tmp_path / "whole" / "classify", steps=[7, 14, 21])


def check_logged(folder: Path, steps: list[int]) -> None:
    """TensorBoard reads what was written, once for each epoch."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("train_loss")] == steps
    losses = [event.value for event in events.Scalars("train_loss")]
    assert losses[-1] < losses[0]
