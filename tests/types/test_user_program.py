"""Type checkers read programs of users strictly: completion goes on after `prepare`, and wrong values are marked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
MYPY_LINE = re.compile(r"(\w+)\.py:(\d+): error:")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def marked_by_mypy(folder: Path) -> set[tuple[str, int]]:
    """Where mypy sees errors, with the settings of `tools/dev.py types` and its cache."""
    done = run(sys.executable, "-m", "mypy", "tests/types/user_program.py", "tests/types/mistakes.py")
    assert done.returncode in (0, 1), done.stderr
    return {(name, int(line)) for name, line in MYPY_LINE.findall(done.stdout)}


def marked_by_pyright(folder: Path) -> set[tuple[str, int]]:
    """Where pyright sees errors in its strict mode."""
    settings = {
        "include": [str(HERE / "user_program.py"), str(HERE / "mistakes.py")],
        "typeCheckingMode": "strict",
    }
    project = folder / "pyrightconfig.json"
    project.write_text(json.dumps(settings))
    done = run(
        sys.executable, "-m", "basedpyright", "-p", str(project), "--pythonpath", sys.executable, "--outputjson"
    )
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 2
    return {
        (Path(row["file"]).stem, row["range"]["start"]["line"] + 1)
        for row in report["generalDiagnostics"]
        if row["severity"] == "error"
    }


@pytest.mark.thorough
@pytest.mark.parametrize("marked", [marked_by_mypy, marked_by_pyright])
def test_strict_checkers_mark_the_wrong_lines_and_no_others(
    marked: Callable[[Path], set[tuple[str, int]]], tmp_path: Path
) -> None:
    lines = (HERE / "mistakes.py").read_text().splitlines()
    wrong = {("mistakes", number) for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert len(wrong) == 5
    assert marked(tmp_path) == wrong
