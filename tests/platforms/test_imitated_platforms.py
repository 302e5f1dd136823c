"""Two CPU processes train, save and load where the system lacks what macOS and Windows lack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
IMITATION = HERE.parent / "support" / "other_platforms"


def run_on(platform: str, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a module of Python where the imitation is in force."""
    environment = {
        **os.environ,
        "IMITATED_PLATFORM": platform,
        "PYTHONPATH": str(IMITATION),
        "PYTHONIOENCODING": "cp1252",
        "HF_HOME": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", *command],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="cp1252",
        check=False,
        timeout=180,
    )


@pytest.mark.launch
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_two_processes_train_save_and_load(platform: str, tmp_path: Path) -> None:
    launch = ("accelerate.commands.launch", "--cpu", "--num_processes", "2", str(HERE / "program.py"), str(tmp_path))
    done = run_on(platform, tmp_path, *launch)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        f"rank {rank} on {platform} trained 4 batches" for rank in range(2)
    ]
    shown = run_on(platform, tmp_path, "accel_cli", "runs", "--dir", str(tmp_path))
    assert shown.returncode == 0, shown.stderr
    assert "a-run-" in shown.stdout
    assert "finished" in shown.stdout
