"""The example programs of pipelines run, and say what their docstrings promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
LAUNCH = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes")


def output_of(script: str, processes: int, *arguments: str) -> str:
    command = [*LAUNCH, str(processes), str(EXAMPLES / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


@pytest.mark.thorough
@pytest.mark.launch
def test_training_in_two_stages_reaches_the_losses_of_one_process() -> None:
    alone = output_of("pipeline_training.py", 1, "--epochs", "1")
    staged = output_of("pipeline_training.py", 2, "--epochs", "1", "--schedule", "1f1b")
    losses = [re.findall(r"epoch 0: loss ([\d.]+)", text) for text in (alone, staged)]
    assert losses[0] == losses[1] != []
    assert "process 1 holds" in staged


@pytest.mark.thorough
@pytest.mark.launch
def test_inference_gives_the_outputs_of_the_whole_model() -> None:
    pytest.importorskip("transformers")
    said = output_of("pipeline_inference.py", 2)
    assert len(differences := re.findall(r"differs by (\S+)", said)) == 2
    assert max(map(float, differences)) < 1e-5
