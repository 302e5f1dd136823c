"""What docs/architecture.md says about adding things: a package from outside adds one of each, in one place each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OUTSIDE = Path(__file__).with_name("outside")
ENTRY_POINTS = """
[accelerate.devices]
toy = outside.device:TOY

[accelerate.engines]
COUNTING = outside.engine:CountingEngine

[accelerate.precisions]
double = outside.precision:DoublePrecision

[accelerate.trackers]
printing = outside.tracker:PrintingTracker

[accelerate.commands]
greet = outside.command

[accelerate.options]
toy = outside.options:ToyOptions
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """In which the package is installed."""
    site = tmp_path_factory.mktemp("site")
    metadata = site / "outside-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return {**os.environ, "PYTHONPATH": f"{OUTSIDE}{os.pathsep}{site}", "ACCELERATE_CONFIG_FILE": str(site / "none")}


def run(environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli", *command], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.takes_turns
@pytest.mark.launch
def test_an_engine_a_precision_a_tracker_and_an_option(environment: dict[str, str], tmp_path: Path) -> None:
    script, folder = str(OUTSIDE / "outside" / "train.py"), str(tmp_path / "state")
    chosen = ["--engine", "COUNTING", "--mixed_precision", "double", "--toy_speed", "7"]
    printed = run(environment, "launch", "--cpu", "--num_processes", "2", *chosen, script, folder)
    assert "engine counting 3" in printed
    assert "precision double torch.float64 torch.float32" in printed
    assert "scale 1.0" in printed
    assert "speed 7" in printed
    assert "tracker run 2 {'loss': 1.0}" in printed


@pytest.mark.takes_turns
@pytest.mark.launch
def test_a_device(environment: dict[str, str]) -> None:
    script = str(OUTSIDE / "outside" / "place.py")
    assert "device toy NO" in run(environment, "launch", "--num_processes", "1", script)


def test_a_command(environment: dict[str, str]) -> None:
    assert run(environment, "greet", "you") == "hello you\n"


def test_a_precision_that_nobody_brings_is_refused(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli", "launch", "--mixed_precision", "dubble", "train.py"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "dubble" in done.stderr
