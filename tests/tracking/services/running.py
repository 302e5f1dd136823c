"""The run that every service is given, and a fresh process to do it in: their libraries keep global state."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hidden_devices import NO_DEVICES

ROOT = Path(__file__).resolve().parents[3]
RESULT = "RESULT "

CONFIG: dict[str, Any] = {
    "learning_rate": 1e-3,
    "epochs": 2,
    "shuffle": True,
    "model": {"name": "tiny", "widths": [8, 16]},
    "path": Path("data"),
    "nothing": None,
}
LOSSES = [1.0, 0.5, 0.25, 0.125, 0.0625]


def needs(service: str) -> Any:
    """Skip a module's tests where the library of a service is missing."""
    from accel_tracking.registry import SERVICES

    library = SERVICES[service].library
    is_there = SERVICES[service].is_available() or "LIBRARIES_REQUIRED" in os.environ
    return pytest.mark.skipif(not is_there, reason=f"{library} is not installed (uv run tools/dev.py trackers has it)")


def in_fresh_process(
    function: Callable[..., Any], folder: Path, *arguments: Any, returncode: int = 0, **environment: str
) -> Any:
    """Call a module's function in a process of its own, in `folder`, with no home and no network; what it returns."""
    where = f"{function.__module__}:{function.__qualname__}"
    clean = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TMPDIR")}
    done = subprocess.run(
        [sys.executable, __file__, where, json.dumps([str(folder), *arguments])],
        cwd=folder,
        env={**clean, **NO_DEVICES, "HOME": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
             "DO_NOT_TRACK": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == returncode, said[-6000:]
    assert "Training goes on" not in said, said[-6000:]
    assert "failed in finish" not in said, said[-6000:]
    actual = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    return json.loads(actual[-1].removeprefix(RESULT)) if actual else None


def train(service: str, folder: str, crash: bool = False, **arguments: Any) -> Any:
    """Log five steps and one of everything that is unusual; returns the accelerator, its trackers still open."""
    import torch

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with=service, project_dir=folder)
    accelerator.init_trackers("digits", config=CONFIG, init_kwargs={service: arguments})
    for step, loss in enumerate(LOSSES):
        accelerator.log({"loss": loss, "train_accuracy": torch.tensor(step / 10)}, step=step)
    if crash:
        raise KeyError("mine")
    unusual = {
        "group": {"a": 1, "b": torch.tensor(2.5)},
        "note": "a text",
        "top@1 (%)": 50,
        "thing": object(),
        "nan": math.nan,
        "inf": math.inf,
        "many": torch.ones(3),
    }
    accelerator.log(unusual, step=5)
    return accelerator


def crash(folder: str, service: str, arguments: dict[str, Any] | None = None) -> None:
    """Log five steps, and end with an error."""
    train(service, folder, crash=True, **arguments or {})


def some_image() -> Any:
    """A picture of shape (4, 6, 3), 8-bit."""
    import numpy as np

    return (np.arange(72).reshape(4, 6, 3) * 3).astype(np.uint8)


def close_to(values: Any) -> list[float]:
    """Rounded, for services that keep 32-bit floats."""
    return [round(float(value), 6) for value in values]


def files_under(folder: str, pattern: str) -> Iterator[Path]:
    """Files of a folder and those below it."""
    return (path for path in Path(folder).rglob(pattern) if path.is_file())


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    result = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
    if result is not None:
        sys.stdout.write(RESULT + json.dumps(result, default=str) + "\n")
