"""Run a program with both libraries and compare what they recorded."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_ports

PROGRAMS = Path(__file__).parent / "programs"
REFERENCE = os.environ.get("REFERENCE_PYTHON", "")
SHOWN = 12
NOTHING = "this case is missing"
TIMEOUT_SECONDS = 300

needs_reference = pytest.mark.skipif(
    not REFERENCE, reason="needs accelerate 1.15 in an environment of its own: uv run tools/dev.py differential"
)
Recorded = dict[tuple[int, str], Any]


def same(program: str, *arguments: str, world: int = 1, tolerance: float = 0.0, **options: Any) -> None:
    """Fail on every case that both libraries do not see alike.

    Args:
        program: Name of a module under `programs/`.
        *arguments: Given to the program.
        world: Number of processes.
        tolerance: Relative difference allowed between floating point numbers.
        **options: `intended`, a mapping from patterns of cases to the reason why ours differs, and `least`, how many
            cases the program must have recorded.
    """
    theirs = recorded(REFERENCE, program, *arguments, world=world)
    ours = recorded(sys.executable, program, *arguments, world=world)
    compare(ours, theirs, tolerance=tolerance, **options)


def recorded(python: str, program: str, *arguments: str, world: int = 1) -> Recorded:
    """What a program records: rank and case to what was seen."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, program, *arguments, world=world, folder=Path(folder))
        return {
            (rank, line["case"]): line["seen"]
            for rank in range(world)
            for line in map(json.loads, (Path(folder) / f"rank_{rank}.jsonl").read_text().splitlines())
        }


def run(python: str, program: str, *arguments: str, world: int, folder: Path) -> None:
    """Start a program on every rank; fail with the errors of those that ended badly."""
    port = str(free_ports(1)[0])
    work = folder / "work"
    work.mkdir(exist_ok=True)
    processes = []
    for rank in range(world):
        environment = _environment() | {"RECORD_FOLDER": str(folder)}
        if world > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            environment |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        errors = (folder / f"errors_{rank}").open("w+")
        command = [python, str(PROGRAMS / f"{program}.py"), *arguments]
        started = subprocess.Popen(command, env=environment, cwd=work, stdout=errors, stderr=errors)
        processes.append((started, errors))
    said = [f"--- rank {rank} ---\n{_end(*started)}" for rank, started in enumerate(processes)]
    ended = not any(process.returncode for process, _ in processes)
    done = all((folder / f"done_{rank}").exists() for rank in range(world))
    if not done or (python != REFERENCE and not ended):  # processes of 1.15 may abort when all is done
        pytest.fail(f"{program} with {python}\n" + "\n".join(said), pytrace=False)


def compare(
    ours: Recorded,
    theirs: Recorded,
    *,
    tolerance: float = 0.0,
    intended: Mapping[str, str] | None = None,
    least: int = 1,
) -> None:
    """Fail on cases that differ without being named, and on named ones that do not differ."""
    intended = intended or {}
    assert len(ours) >= least, f"{len(ours)} cases are fewer than {least}"
    ours, theirs = ({key: seen.get(key, NOTHING) for key in {*ours, *theirs}} for seen in (ours, theirs))
    different = {key for key in ours if not alike(ours[key], theirs[key], tolerance)}
    unused = set(intended)
    for key in sorted(different):
        reasons = [pattern for pattern in intended if fnmatch.fnmatchcase(key[1], pattern)]
        unused -= set(reasons)
        if reasons:
            different.discard(key)
    shown = "\n".join(
        f"rank {k[0]}, {k[1]}\n  1.15: {theirs[k]}\n  ours: {ours[k]}" for k in sorted(different)[:SHOWN]
    )
    assert not different, f"{len(different)} of {len(ours)} cases differ:\n{shown}"
    assert not unused, f"these no longer differ: {sorted(unused)}"


def alike(ours: Any, theirs: Any, tolerance: float = 0.0) -> bool:
    """Equal, up to rounding; for exceptions, ours may be a more special one."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if "raises" in ours and "raises" in theirs:
            return theirs["raises"][0] in ours["raises"]
        return ours.keys() == theirs.keys() and all(alike(ours[key], theirs[key], tolerance) for key in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(alike(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))
    if isinstance(ours, float) and isinstance(theirs, float):
        both_nan = math.isnan(ours) and math.isnan(theirs)
        return both_nan or ours == theirs or math.isclose(ours, theirs, rel_tol=tolerance, abs_tol=tolerance)
    return type(ours) is type(theirs) and ours == theirs


def _environment() -> dict[str, str]:
    """Nothing of the machine's own settings, so that both see the same."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "RECORD_MESSAGES") if name in os.environ}
    more = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
    return kept | more | {"PYTHONPATH": str(PROGRAMS), "HF_HOME": "/nonexistent"}


def _end(process: subprocess.Popen[bytes], errors: Any) -> str:
    try:
        process.wait(TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    errors.seek(0)
    with errors:
        return f"{process.returncode}: {errors.read()[-3000:]}"
