"""Two jobs that save into one project folder at once both succeed, and nothing is lost of either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.two_jobs import SCENARIOS
from tests.support.short_run import values_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One program for all scenarios of this run, because importing torch costs more than the saves."""
    folder = str(tmp_path_factory.mktemp("jobs"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.two_jobs", folder, *values_of(request, "scenario")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.sample(1)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_jobs_at_once_lose_nothing(scenario: str, outcomes: dict[str, Any]) -> None:
    assert not outcomes[scenario], "\n".join(outcomes[scenario])
