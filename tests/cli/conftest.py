"""Where commands are tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_cli.launch.plan import Plan


@pytest.fixture
def in_a_folder_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with an empty `train.py`, and without settings of the user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").touch()


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans of the launches of a test, which start nothing."""
    seen: list[Plan] = []
    monkeypatch.setattr("accel_cli.launch.command.run_plan", lambda plan: seen.append(plan) or 0)
    return seen
