"""A process killed at any step of a save leaves a whole checkpoint, either the last or the new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.killed_saves import SCENARIOS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One program for all scenarios, because importing torch costs more than the kills."""
    return last_line_of("tests.hostile.killed_saves", str(tmp_path_factory.mktemp("kills")))


def last_line_of(program: str, *words: str) -> dict[str, Any]:
    """Run a module of these tests; returns the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, "-m", program, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    actual: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return actual


@pytest.mark.thorough
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_kill_at_any_step_leaves_a_whole_checkpoint(scenario: str, outcomes: dict[str, Any]) -> None:
    outcome = outcomes[scenario]
    assert not outcome["problems"]
    assert outcome["steps"] > 30  # it was really killed, many times
    assert 0 < outcome["new"] < outcome["steps"]  # before and after the moment of publication


@pytest.mark.thorough
def test_runs_killed_at_random_moments_go_on_from_a_whole_checkpoint(tmp_path: Path) -> None:
    actual = last_line_of("tests.hostile.killed_while_saving", str(tmp_path), "20")
    assert actual["problems"] == []
    assert actual["in a save"] > 0
