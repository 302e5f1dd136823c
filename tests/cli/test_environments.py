"""Scripts find the variables that they find under accelerate 1.15."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.pretended import plan_of

FACTS = json.loads((Path(__file__).parent / "facts" / "environments.json").read_text())


@pytest.mark.parametrize("launch", FACTS["launches"], ids=lambda launch: " ".join(launch["argv"])[:60])
def test_variables(launch: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("accel_cli.launch.validate.CHECKS", ())  # no script, no FP8 library, no second GPU here
    for name, content in FACTS["files"].items():
        (tmp_path / name).write_text(json.dumps(content))
    plan = plan_of(*launch["argv"])
    assert plan.environment == launch["environment"]
    if "command" in launch:
        assert plan.runner == "simple"
        assert list(plan.argv[-len(launch["command"]) :]) == launch["command"]
    else:
        assert plan.runner == "torchrun"
