"""A process killed at any step of a save leaves a whole checkpoint, either the last or the new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hostile.killed_saves import SCENARIOS
from tests.hostile.running import last_line_of


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One program for all scenarios, because importing torch costs more than the kills."""
    return last_line_of("-m", "tests.hostile.killed_saves", str(tmp_path_factory.mktemp("kills")))


@pytest.mark.thorough
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_kill_at_any_step_leaves_a_whole_checkpoint(scenario: str, outcomes: dict[str, Any]) -> None:
    outcome = outcomes[scenario]
    assert not outcome["problems"]
    assert outcome["steps"] > 30  # it was really killed, many times
    assert 0 < outcome["new"] < outcome["steps"]  # before and after the moment of publication


@pytest.mark.thorough
def test_runs_killed_at_random_moments_go_on_from_a_whole_checkpoint(tmp_path: Path) -> None:
    actual = last_line_of("-m", "tests.hostile.killed_while_saving", str(tmp_path), "20")
    assert actual["problems"] == []
    assert actual["in a save"] > 0
