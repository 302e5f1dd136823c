"""Running the programs of these tests: the number of devices is fixed for a process, so each has one of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
IS_THERE = importlib.util.find_spec("torch_xla") is not None
needs_torch_xla = pytest.mark.skipif(
    not IS_THERE and "LIBRARIES_REQUIRED" not in os.environ,
    reason="torch_xla is not installed; run: uv run tools/dev.py xla",
)
OURS = ("ACCELERATE_", "PJRT_", "XLA_", "USE_TORCH_XLA", "CPU_NUM_DEVICES")


def environment(**variables: str) -> dict[str, str]:
    """That of a machine on which nobody has chosen anything yet, with these variables."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", **variables}


def devices(count: int) -> dict[str, str]:
    """The variables for one device, or for several by SPMD."""
    return {"PJRT_DEVICE": "CPU"} | ({"XLA_USE_SPMD": "1", "CPU_NUM_DEVICES": str(count)} if count > 1 else {})


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments; the outcome is not checked."""
    return subprocess.run(
        [sys.executable, *words], env=environment(**variables), cwd=ROOT, capture_output=True, text=True, timeout=600
    )


def results_of(program: str, folder: Path, *words: str, **variables: str) -> dict[str, Any]:
    """What a program of this folder has written."""
    results = folder / f"{Path(program).stem}.json"
    done = run(str(Path(__file__).with_name(program)), str(results), str(folder), *words, **variables)
    assert done.returncode == 0, done.stderr
    actual: dict[str, Any] = json.loads(results.read_text())
    return actual
