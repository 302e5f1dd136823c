"""Two jobs that save into one project folder at once both succeed, and nothing is lost of either."""

from __future__ import annotations

from typing import Any

import pytest

from tests.hostile.running import last_line_of
from tests.hostile.two_jobs import SCENARIOS
from tests.support.short_run import values_of


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One program for all scenarios of this run, because importing torch costs more than the saves."""
    folder = str(tmp_path_factory.mktemp("jobs"))
    return last_line_of("-m", "tests.hostile.two_jobs", folder, *values_of(request, "scenario"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_jobs_at_once_lose_nothing(scenario: str, outcomes: dict[str, Any]) -> None:
    assert not outcomes[scenario], "\n".join(outcomes[scenario])
