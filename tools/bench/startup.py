"""What starting costs: importing, asking for help, launching one process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tools.bench.row import Row

REPEATS = 9
# as on a user's machine, where byte code is kept: the first, unmeasured runs write it
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
IMPORT = (
    "import torch, time; begin = time.perf_counter(); import accelerate; from accelerate import Accelerator; "
    "print(time.perf_counter() - begin)"
)
BARE_IMPORT = "import torch, time; begin = time.perf_counter(); import accelerate; print(time.perf_counter() - begin)"


def rows(reference: Path) -> list[Row]:
    """Measure ours and the reference by turns; every figure is the best of several."""
    ours = Path(sys.executable)
    found = []
    mine, theirs = by_turns(lambda python: import_seconds(python, BARE_IMPORT), ours, reference)
    what = "`import accelerate` over `import torch`"
    found.append(Row(what, "ms", mine * 1e3, theirs * 1e3, 0.0, mine * 1e3, 10, "ms"))
    mine, theirs = by_turns(lambda python: import_seconds(python, IMPORT), ours, reference)
    found.append(
        Row("`from accelerate import Accelerator` over torch", "ms", mine * 1e3, theirs * 1e3, 0.0, mine / theirs, 1.0)
    )
    floor = min(command_seconds([str(ours), "-c", "pass"]) for _ in range(REPEATS))
    for words in (["--help"], ["env", "--help"], ["launch", "--help"]):
        mine, theirs = by_turns(lambda python, words=words: help_seconds(python, words), ours, reference)
        found.append(Row(f"`accelerate {' '.join(words)}`", "s", mine, theirs, floor, mine, 0.1, "s"))
    mine, theirs = by_turns(first_line_seconds, ours, reference)
    what = "`accelerate launch --cpu --num_processes 1` to the script's first line"
    found.append(Row(what, "s", mine, theirs, floor, mine, 0.15, "s"))
    found.append(_two_processes(ours))
    found.append(_environment(ours, reference))
    return found


def _two_processes(ours: Path) -> Row:
    """Two processes, ours and bare torchrun's by turns; the reference starts one only."""
    commands = (
        [str(ours.parent / "accelerate"), "launch", "--cpu", "--num_processes", "2"],
        [str(ours), "-m", "torch.distributed.run", "--nproc-per-node", "2"],
    )
    pairs = [[last_line_seconds(command) for command in commands] for _ in range(REPEATS)]
    mine, floor = (min(column) for column in zip(*pairs, strict=True))
    return Row(
        "two CPU processes to both scripts' first lines; floor: torchrun", "s", mine, None, floor, mine / floor, 1.02
    )


def _environment(ours: Path, reference: Path) -> Row:
    """`accelerate env`, whose floor is the import of torch that it needs."""
    mine, theirs = by_turns(lambda python: help_seconds(python, ["env"]), ours, reference)
    floor = min(command_seconds([str(ours), "-c", "import torch"]) for _ in range(REPEATS))
    return Row("`accelerate env`; floor: `import torch`", "s", mine, theirs, floor, mine / floor, 1.05)


def by_turns(measure: Callable[[Path], float], ours: Path, reference: Path) -> tuple[float, float]:
    """The best of several measurements on each side, taken alternately."""
    pairs = [(measure(ours), measure(reference)) for _ in range(REPEATS)]
    return min(mine for mine, _ in pairs), min(theirs for _, theirs in pairs)


def import_seconds(python: Path, program: str) -> float:
    """Seconds that a program printed."""
    return float(
        subprocess.run(
            [str(python), "-c", program], capture_output=True, text=True, check=True, env=ENVIRONMENT
        ).stdout
    )


def command_seconds(command: list[str]) -> float:
    """Wall time of a command."""
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=ENVIRONMENT)
    return time.perf_counter() - begin


def help_seconds(python: Path, words: list[str]) -> float:
    """Wall time of an `accelerate` command."""
    return command_seconds([str(python.parent / "accelerate"), *words])


def first_line_seconds(python: Path) -> float:
    """From typing the launch command to the script's first statement."""
    return last_line_seconds([str(python.parent / "accelerate"), "launch", "--cpu", "--num_processes", "1"])


def last_line_seconds(command: list[str]) -> float:
    """From typing a command that takes a script to the first statement of the script, in the last process that ran it."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text("import sys, time; sys.stdout.write(f'{time.time()}\\n')")
        begin = time.time()
        done = subprocess.run(
            [*command, str(script)], capture_output=True, text=True, check=True, env={**ENVIRONMENT, "HF_HOME": folder}
        )
    return max(float(line) for line in done.stdout.split()) - begin
