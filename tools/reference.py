"""accelerate 1.15 in an environment of its own, with the same torch as ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-reference"


def reference_python() -> Path:
    """The interpreter that has accelerate 1.15; its environment is made on first use."""
    python = FOLDER / "bin" / "python"
    if not python.exists():
        subprocess.run(["uv", "venv", "-q", "--python", sys.executable, str(FOLDER)], check=True)
        wanted = ["accelerate==1.15.0", f"torch=={version('torch')}", f"numpy=={version('numpy')}"]
        wanted += [f"{name}=={version(name)}" for name in ("deepspeed", "transformers") if find_spec(name)]
        subprocess.run(["uv", "pip", "install", "-q", "--python", str(python), *wanted], check=True)
    return python


def run_json(python: Path | str, script: Path | str, *arguments: str, **environment: str) -> Any:
    """Run a script with one torch thread and return what its last line of output says, read as JSON."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [str(python), str(script), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_on_ranks(python: Path | str, script: Path | str, world: int = 2, arguments: Sequence[str] = ()) -> Any:
    """Run a script with arguments in several processes on the CPU; what the first line of output that is JSON says.

    A process that aborts at exit, when all is measured and printed, does no harm.
    """
    command = [
        str(python),
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(world),
        str(script),
        *arguments,
    ]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
    if line is None:
        raise RuntimeError(f"{script} ended with {done.returncode} and printed no result:\n{done.stderr[-4000:]}")
    return json.loads(line)
