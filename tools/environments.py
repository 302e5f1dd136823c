"""Python environments to try packages in: empty ones, with exactly what is asked for."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path


def make_environment(folder: Path, *, python: str | None = None, path: Sequence[str] = ()) -> Path:
    """Make an empty environment, in place of an older one.

    Args:
        folder: Where.
        python: Which version, for example `"3.13"`; that of the workspace when None.
        path: Folders to look for it in, after those of PATH.

    Returns:
        Its interpreter.
    """
    chosen = [] if python is None else ["--python", python]
    variables = {"PATH": os.pathsep.join([os.environ["PATH"], *path]), "VIRTUAL_ENV": ""}
    subprocess.run(["uv", "venv", "-q", "--clear", *chosen, str(folder)], check=True, env={**os.environ, **variables})
    return folder / "bin" / "python"


def install(python: Path, *wanted: str, wheels: Path | None = None, cwd: Path | None = None) -> None:
    """Install into an environment.

    Args:
        python: Its interpreter.
        wanted: Requirements and options, as `uv pip install` takes them.
        wheels: A folder whose wheels come before those of the package index.
        cwd: The folder that relative paths and groups belong to.
    """
    found = [] if wheels is None else ["--find-links", str(wheels)]
    subprocess.run(["uv", "pip", "install", "-q", "--python", str(python), *found, *wanted], check=True, cwd=cwd)
