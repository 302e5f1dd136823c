"""The examples under docs/examples, as a user starts them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def losses_of(processes: int, *options: str) -> list[str]:
    """What one epoch of the shared transformer prints as loss."""
    accelerate = Path(sys.executable).with_name("accelerate")
    command = [str(accelerate), "launch", "--cpu", "--num_processes", str(processes)]
    script = [str(EXAMPLES / "shared_transformer.py"), "--epochs", "1", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, *script], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr
    return re.findall(r"loss (\d+\.\d{3})", run.stdout)


@pytest.mark.thorough
@pytest.mark.launch
def test_the_shared_transformer_trains_the_same_in_every_mode() -> None:
    expected = losses_of(1)
    assert len(expected) == 1
    assert all(losses_of(2, mode, "2") == expected for mode in ("--tp", "--cp", "--sp"))


@pytest.mark.thorough
@pytest.mark.launch
@pytest.mark.parametrize(
    "options",
    [
        ["--use_fsdp", "--fsdp_version", "2"],
        ["--use_fsdp", "--fsdp_version", "1"],
        ["--use_parallelism_config", "--parallelism_config_pp_size", "2"],
    ],
)
def test_the_digits_are_learned_in_every_mode(options: list[str], tmp_path: Path) -> None:
    accelerate = Path(sys.executable).with_name("accelerate")
    command = [str(accelerate), "launch", "--cpu", "--num_processes", "2", *options, str(EXAMPLES / "digits.py")]
    (tmp_path / "notes.txt").write_text("mine")
    for further in ([], [], ["--resume"]):  # a run, the same once more, and its continuation
        epochs = "4" if further else "3"
        run = subprocess.run(
            [*command, "--epochs", epochs, "--output", str(tmp_path), *further],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert run.returncode == 0, run.stderr
    assert "resumed after epoch 3" in run.stdout
    (accuracy,) = re.findall(r"epoch +4: test accuracy ([\d.]+)%", run.stdout)
    assert float(accuracy) > 90
    assert (tmp_path / "notes.txt").read_text() == "mine"
