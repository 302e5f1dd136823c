"""Commands that run in a process of their own, and commands that only say what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_cli.main import main

PROGRAM = str(Path(sys.executable).parent / "accelerate")


def run(*words: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program, with these variables beside those of this process."""
    environ = {**os.environ, **variables}
    return subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=300)


def python(*words: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python."""
    return run(sys.executable, *words, folder=folder, **variables)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The line that a command says, and nothing else, when it ends with status 2."""
    assert main(list(words)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    return said.err
