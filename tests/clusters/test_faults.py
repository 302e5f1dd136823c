"""Ranks that are killed: the launch starts all of them again, from the newest checkpoint, and ends with the same weights."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "ray" / "training.py"
RANKS, BATCH_SIZE = 4, 2
KILLS = int(os.environ.get("FAULT_KILLS", "2"))
STEPS = 2 * KILLS + 1
SAMPLES = STEPS * RANKS * BATCH_SIZE


def launch(folder: Path, *words: str, **options: object) -> str:
    folder.mkdir()
    words = ("launch", "--cpu", "--num_processes", str(RANKS), *words, str(SCRIPT), str(folder), json.dumps(options))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder), "PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli", *words], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return (folder / "weight").read_text()


@pytest.mark.thorough
@pytest.mark.launch
def test_ranks_that_are_killed_at_random_steps(tmp_path: Path) -> None:
    chance = random.Random(int(os.environ.get("FAULT_SEED", "0")))
    steps = sorted(chance.sample(range(1, STEPS), KILLS))
    kills = [(step, chance.randrange(RANKS), ("before", "saving")[number % 2]) for number, step in enumerate(steps)]
    undisturbed = launch(tmp_path / "undisturbed", num_samples=SAMPLES)
    folder = tmp_path / "killed"
    assert launch(folder, "--max_restarts", str(KILLS), num_samples=SAMPLES, kills=kills) == undisturbed
    killed = sorted(float(file.read_text()) for file in folder.glob("*.killed"))
    assert len(killed) == KILLS, "all were killed"
    log = [line.split() for line in (folder / "log").read_text().splitlines()]
    assert len(log) <= STEPS + KILLS, "after each, at most one step is done again"
    again = [min(float(end) for _, end in log if float(end) > moment) - moment for moment in killed]
    print("seconds from a kill to the next step:", *(f"{seconds:.1f}" for seconds in sorted(again)))  # noqa: T201
    taken = [sample for step in range(STEPS) for sample in json.loads((folder / f"{step}.step").read_text())]
    assert sorted(taken) == list(range(SAMPLES))
