"""Training on devices that are not here, played by torch's spare backend: from the launch to the files of a checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_state.devices import DEVICE_KINDS
from tests.support.played_device import CAN_PLAY

ROOT = Path(__file__).resolve().parents[2]
VENDORS = ["npu", "mlu", "sdaa", "musa", "neuron"]  # torch has these names from a library; it knows the others itself


@pytest.mark.launch
@pytest.mark.skipif(not CAN_PLAY, reason="this torch has no backends written in Python")
@pytest.mark.takes_turns("other machines")
def test_training_on_each(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    script = Path(__file__).with_name("devices_in_one_launch.py")
    words = ["--num_processes", "1", str(script), str(tmp_path), *VENDORS]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *words],
        env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"trained on {name}" for name in VENDORS]


def test_every_row_is_complete() -> None:
    """A kind of several devices has a backend of collectives, and a variable that hides devices."""
    for kind in DEVICE_KINDS:
        single = kind.name in ("mps", "cpu")
        assert (kind.visible_devices_variable is None) == single, kind.name
        assert (kind.collective_backend is None) == (kind.name == "mps")
        assert kind.library is not None or kind.name in ("cuda", "xpu", "mps", "cpu")  # which torch has itself
