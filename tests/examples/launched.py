"""Examples that were run by one launch, and what each of them says about itself."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from accel_cli.examples.catalog import FILES

DRIVER = Path(__file__).with_name("driver.py")
NUMBER = re.compile(r"\d+\.\d+(?:e[+-]\d+)?")
PROMISE = re.compile(r"(at least|below) ((?:\d+\.\d+)|(?:1e-\d))")


@dataclass(frozen=True)
class Run:
    """One command line of an example.

    Attributes:
        words: The path of the example, and its arguments, separated by blanks; `{here}` stands for the folder.
        says: A pattern that the output of the main process contains.
        keeps_promise: Whether the last line must be as good as the docstring says.
    """

    words: str
    says: str = ""
    keeps_promise: bool = True


def launch(runs: list[Run], processes: int, folder: Path) -> list[str]:
    """Run examples one after the other, under one launch; returns what the main process printed in each."""
    work = folder / "work.json"
    work.write_text(json.dumps([run.words.format(here=folder).split() for run in runs]))
    command = [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_processes", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "DS_BUILD_SHM_COMM": "0"}
    environment |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    done = subprocess.run(
        [*command, str(DRIVER), str(work)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    outputs = []
    for rank in range(processes):
        results = json.loads((folder / f"work.rank{rank}").read_text())
        for run, result in zip(runs, results, strict=False):
            assert result["error"] is None, f"rank {rank} of {processes}, {run.words}:\n{result['error'][-5000:]}"
        assert len(results) == len(runs)
        if rank == 0:
            outputs = [result["printed"] for result in results]
    return outputs


def check(run: Run, printed: str) -> None:
    """Compare what a run printed with what is expected, and its last line with what the docstring promises."""
    assert re.search(run.says, printed), f"{run.words} does not say {run.says!r}:\n{printed}"
    if not run.keeps_promise:
        return
    said = ast.get_docstring(ast.parse((FILES / run.words.split()[0]).read_text())) or ""
    (promise,) = PROMISE.findall(" ".join(said.split()))
    last = printed.strip().splitlines()[-1]
    value, bound = float(NUMBER.findall(last)[-1]), float(promise[1])
    kept = value >= bound if promise[0] == "at least" else value < bound
    assert kept, f"{run.words} promises {' '.join(promise)}, and ends with: {last}"
