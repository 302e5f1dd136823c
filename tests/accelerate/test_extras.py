"""Every extra that a page or an error names is there to be installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"accelerate\[([a-z-]+)\]|extra=\"([a-z-]+)\"")
OF_1_15 = {"deepspeed", "rich"}  # those that are not for its own developers, without sagemaker


def test_extras_that_are_named_exist() -> None:
    there = set(
        tomllib.loads((ROOT / "packages/accelerate/pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
    sources = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("packages/*/README.md")]
    named = {name for source in sources for actual in NAMED.findall(source.read_text()) for name in actual if name}
    assert len(named) > 5
    assert named | OF_1_15 <= there


@pytest.mark.parametrize(("value", "boxes"), [("1", True), ("0", False)])
def test_tracebacks_are_rich_where_the_environment_asks_for_it(value: str, boxes: bool) -> None:
    pytest.importorskip("rich.traceback")
    done = subprocess.run(
        [sys.executable, "-c", "import accelerate; 1 / 0"], capture_output=True, text=True, check=False,
        env={**os.environ, "ACCELERATE_ENABLE_RICH": value},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ZeroDivisionError: division by zero")
    assert ("Traceback (most recent call last) \u2500" in done.stderr) is boxes
