"""Running the grid: one launch for each configuration, after one process that is the reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict

from accel_cli.errors import UsageError
from accel_cli.grid.compare import TOLERANCE, Run, compare, read_facts, read_run
from accel_cli.grid.configurations import REFERENCE, Configuration, chosen
from accel_cli.grid.observation import Observation
from accel_cli.grid.table import DIFFERS, FAILED, HEADS, NOT_RUN, OK, Row, line
from accel_cli.launch.unconfigured import unconfigured


def run_grid(words: list[str], only: str | None = None) -> int:
    """Run a script in each configuration, and print how far its figures are from those of one process.

    Args:
        words: The script and its arguments.
        only: Names of configurations, separated by commas; all of them when None.

    Returns:
        The exit status for the shell: 1 if a configuration disagrees or fails.

    Raises:
        UsageError: There is no such script or configuration, or the script takes no step in one process.
    """
    rows = chosen(only)
    if not os.path.isfile(words[0]):
        raise UsageError(
            f"The script {words[0]!r} does not exist. Pass a Python file: accelerate test --grid train.py."
        )
    with tempfile.TemporaryDirectory(prefix="accelerate-grid-") as folder:
        reference = _reference(folder, words)
        print(line(HEADS), flush=True)
        counts: Counter[str] = Counter()
        for configuration in rows:
            row = _result(configuration, folder, words, reference)
            counts[row.status] += 1
            print(line(row.cells()), flush=True)
    print(
        f"{', '.join(f'{counts[name]} {name}' for name in (OK, DIFFERS, FAILED, NOT_RUN))} (tolerance {TOLERANCE:.0e})"
    )
    return 1 if counts[DIFFERS] + counts[FAILED] else 0


def _reference(folder: str, words: list[str]) -> Run:
    records, status, said = _launch(Configuration(REFERENCE, 1), folder, words, "")
    if status:
        print(said, file=sys.stderr)
        raise UsageError(f"{words[0]} fails in one process, with exit status {status}; its output is above.")
    run = read_run(records)
    if not run.losses:
        raise UsageError(
            f"{words[0]} took no optimizer step in one process. The grid needs a script that trains by accelerator.backward(loss) "
            "and the step() of a prepared optimizer."
        )
    return run


def _result(configuration: Configuration, folder: str, words: list[str], reference: Run) -> Row:
    name, ranks = configuration.name, configuration.ranks
    lacking = _lacking(configuration, reference)
    if lacking:
        return Row(name, ranks, NOT_RUN, lacking)
    start = time.monotonic()
    flags = configuration.flags.format(**reference.facts)
    records, status, said = _launch(configuration, folder, words, flags)
    seconds = time.monotonic() - start
    if status:
        facts = read_facts(records)
        error = next((one["error"] for one in facts if "error" in one), f"exit status {status}")
        reason = " ".join(error.split())
        if facts and not any(one["began"] for one in facts):
            return Row(name, ranks, NOT_RUN, reason, seconds=seconds)
        print(said, file=sys.stderr)
        return Row(name, ranks, FAILED, reason, seconds=seconds)
    comparison = compare(read_run(records), reference)
    return Row(name, ranks, DIFFERS if comparison.reason else OK, comparison.reason, comparison.errors, seconds)


def _lacking(configuration: Configuration, reference: Run) -> str:
    """Why a configuration cannot run the script; empty if it may."""
    from accel_state.libraries import is_installed

    if configuration.library and not is_installed(configuration.library):
        return f"{configuration.library} is not installed"
    if configuration.needs_blocks and not reference.facts["has_blocks"]:
        return "the script has no `with accelerator.maybe_context_parallel(...)`"
    return ""


def _launch(configuration: Configuration, folder: str, words: list[str], flags: str) -> tuple[str, int, str]:
    """Launch the script in one configuration.

    Returns:
        The folder with the records of its ranks, the exit status, and what was printed.
    """
    records = os.path.join(folder, configuration.name.replace(" ", "-"))
    os.mkdir(records)
    observed = ["--module", "accel_cli.grid.observe", json.dumps(asdict(Observation(records))), *words]
    with unconfigured() as (config_file, environment):
        launch = ["-m", "accel_cli.main", "launch", "--config_file", config_file, "--cpu", "--main_process_port", "0"]
        launch += ["--num_machines", "1", "--num_processes", str(configuration.ranks), *flags.split()]
        # one thread, so that every configuration adds numbers in the same order
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
        done = subprocess.run(
            [sys.executable, *launch, *observed],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
    return records, done.returncode, done.stdout
