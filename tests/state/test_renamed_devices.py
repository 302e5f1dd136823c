"""The table's paths on devices that torch really knows, if only by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.takes_turns("other machines")
def test_vendors_devices_under_their_names() -> None:
    script = Path(__file__).with_name("renamed_device.py")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    done = subprocess.run(
        [sys.executable, str(script), "npu", "mlu", "sdaa", "musa", "neuron"],
        env=clean | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
