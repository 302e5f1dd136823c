"""`ACCELERATE_CHECK_GRADIENTS=1 accelerate launch ...`: before a run, its first optimizer step is compared with one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from accel_cli.grid.compare import TOLERANCE, compare, read_facts, read_run
from accel_cli.grid.observe import ENGINE_ARGUMENTS, Observation
from accel_cli.launch.plan import make_plan
from accel_cli.launch.resolve import RUNS_HERE
from accel_cli.launch.settings import CHECK_GRADIENTS, ROWS, LaunchSettings

REPLACED = (CHECK_GRADIENTS, "ACCELERATE_MIXED_PRECISION", "ACCELERATE_ENGINE")
# exact and repeatable: numbers are added in one order, without TF32
EXACT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "NVIDIA_TF32_OVERRIDE": "0"}
# each of the two launches is a single attempt, and neither writes the log files of the run
ONE_ATTEMPT: dict[str, Any] = {name: ROWS[name].default for name in ("max_restarts", "tee", "log_dir")}
ONE_PROCESS: dict[str, Any] = {"num_processes": 1, "runner": "simple", "engine": None} | dict.fromkeys(
    ("multi_gpu", "use_fsdp", "use_deepspeed", "use_parallelism_config"), False
)
# why a launch cannot be checked -> whether this is so; the first that is true counts
OBSTACLES: dict[str, Callable[[LaunchSettings], object]] = {
    "{0.started_by} has started this command on each process": lambda settings: settings.started_by,
    "the processes are started by {0.runner}": lambda settings: settings.runner not in RUNS_HERE,
    "{0.num_machines} machines take part": lambda settings: settings.num_machines > 1,
    "Megatron-LM trains a model of its own": lambda settings: settings.use_megatron_lm,
    "{0.training_script} is no Python program": lambda settings: settings.no_python,
    "the script is read from standard input": lambda settings: settings.training_script == "-",
}


def check_launch(settings: LaunchSettings) -> int:
    """Take the first optimizer step of a script in one process and as a launch would, and print in a line how far they are apart.

    Args:
        settings: The resolved settings of the launch.

    Returns:
        The exit status for the shell: 1 if the figures differ, or the script fails in this step under the settings of
        the launch alone. 0 if they agree, or nothing can be compared.
    """
    obstacle = next((why for why, applies in OBSTACLES.items() if applies(settings)), None)
    if obstacle is not None:
        return _not_checked(obstacle.format(settings))
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="accelerate-check-") as folder:
        alone, here = (os.path.join(folder, name) for name in ("one-process", "launch"))
        status, _ = _launch(settings.with_changes(**ONE_PROCESS), alone, settings.num_processes, ENGINE_ARGUMENTS)
        if status:
            return _not_checked(f"in one process, the script ends with {_end(alone, status)}")
        reference = read_run(alone)
        if not reference.losses:
            return _not_checked("the script took no optimizer step in one process")
        status, said = _launch(settings, here, settings.num_processes, ())
        if status and not any(rank["began"] for rank in read_facts(here)):
            return _not_checked(f"before its first forward pass, the script ends with {_end(here, status)}")
        if status:
            return _stop(f"{said}Gradients not checked: the first step ends with {_end(here, status)}.")
        comparison = compare(read_run(here), reference)
    loss, norm, update = (f"{comparison.errors[name]:.1e}" for name in ("loss", "norm", "update"))
    cost = f"tolerance {TOLERANCE:.0e}; {time.monotonic() - start:.0f} s"
    figures = f"(loss {loss}, gradient norm {norm}, update {update}; {cost})"
    if comparison.reason:
        return _stop(f"Gradients differ from one process: {comparison.reason} {figures}.")
    _say(f"Gradients checked: relative differences of the first step from one process {figures}.")
    return 0


def _launch(settings: LaunchSettings, folder: str, batch_size: int, left_out: tuple[str, ...]) -> tuple[int, str]:
    """Take the first step of the script. Return the exit status, and what was printed."""
    os.mkdir(folder)
    observation = Observation(folder, 1, batch_size, {"mixed_precision": "no"}, left_out, bool(settings.module))
    words = [json.dumps(asdict(observation)), settings.training_script, *settings.training_script_args]
    environ = {name: text for name, text in os.environ.items() if name not in REPLACED} | EXACT
    observed = settings.with_changes(
        training_script="accel_cli.grid.observe", training_script_args=words, module=True, mixed_precision="no",
        num_cpu_threads_per_process=1, port_was_named=False, **ONE_ATTEMPT,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli.launch.planned"], input=json.dumps(asdict(make_plan(observed, environ))),
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def _end(folder: str, status: int) -> str:
    """How the script ended: the error of the first rank that has one, or the exit status."""
    error = next((rank["error"] for rank in read_facts(folder) if "error" in rank), f"exit status {status}")
    return " ".join(error.split())


def _not_checked(reason: str) -> int:
    _say(f"Gradients not checked: {reason}.")
    return 0


def _stop(reason: str) -> int:
    _say(f"{reason} The run was not started. To start it all the same, unset {CHECK_GRADIENTS}.")
    return 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
