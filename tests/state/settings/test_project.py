"""Folders and checkpoint naming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel_state.settings.project import ProjectConfiguration


def test_logs_go_to_the_project_unless_told_otherwise() -> None:
    assert ProjectConfiguration("runs").logging_dir == "runs"
    assert ProjectConfiguration("runs", logging_dir="logs").logging_dir == "logs"
    assert ProjectConfiguration(Path("runs")).logging_dir == Path("runs")
    assert ProjectConfiguration().logging_dir is None


def test_directories_can_be_set_later() -> None:
    config = ProjectConfiguration(automatic_checkpoint_naming=True)
    config.set_directories("runs")
    assert (config.project_dir, config.logging_dir) == ("runs", "runs")
    config.set_directories("others")
    assert (config.project_dir, config.logging_dir) == ("others", "runs")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"total_limit": 0}, "total_limit=0 .* at least 1"),
        ({"total_limit": -1}, "total_limit=-1"),
        ({"total_limit": 1.5}, "total_limit=1.5"),
        ({"iteration": -1}, "iteration=-1"),
        ({"project_dir": 3}, "project_dir=3 .* a path"),
        ({"automatic_checkpoint_naming": "perhaps"}, "automatic_checkpoint_naming='perhaps'"),
    ],
)
def test_wrong_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProjectConfiguration(**given)
