"""What is refused before anything starts."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Callable

from accel_cli.errors import MissingFileError, NotInThisReleaseError, UsageError, did_you_mean

ONE_OF = ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp")

# option -> what it asks for
NOT_IN_THIS_RELEASE = {
    "use_deepspeed": "train with DeepSpeed",
    "tpu": "start TPU processes",
    "tpu_use_cluster": "start processes on a TPU pod",
    "mpirun_hostfile": "start processes with mpirun",
}


def check_flags(args: Namespace) -> None:
    """Refuse combinations that no settings file can repair.

    Args:
        args: The parsed command line.

    Raises:
        ValueError: When it contradicts itself or asks for something that is not possible.
    """
    given = [f"--{name}" for name in ONE_OF if getattr(args, name)]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude one another: give one of them.")
    if args.module and args.no_python:
        raise UsageError("--module and --no_python exclude one another: give one of them.")
    if args.multi_gpu and args.num_processes == 1:
        raise UsageError("--multi_gpu needs at least 2 processes, got --num_processes 1: leave one of the two out.")
    for name, least in {"num_processes": 1, "num_machines": 1, "num_cpu_threads_per_process": 1}.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise UsageError(f"--{name} must be at least {least}, got {value}.")
    _check_release(args)


def check_settings(settings: Namespace) -> None:
    """Refuse settings that cannot be carried out.

    Args:
        settings: The resolved settings.

    Raises:
        ValueError: When they contradict one another.
        FileNotFoundError: When the script does not exist.
    """
    for check in CHECKS:
        check(settings)


def _check_release(settings: Namespace) -> None:
    for name, what in NOT_IN_THIS_RELEASE.items():
        if getattr(settings, name):
            raise NotInThisReleaseError(f"This release cannot {what} yet (--{name}).")


def _check_processes(settings: Namespace) -> None:
    count, machines = settings.num_processes, settings.num_machines
    if settings.sources.get("num_processes") == "file" and count == -1:
        raise UsageError("The settings file leaves the number of processes open: give --num_processes.")
    if count < 1:
        raise UsageError(f"num_processes must be at least 1, got {count}.")
    if machines < 1:
        raise UsageError(f"num_machines must be at least 1, got {machines}.")
    if count % machines:
        raise UsageError(
            f"num_processes counts those of all machines: {count} cannot be shared equally by {machines} machines."
        )


def _check_machines(settings: Namespace) -> None:
    port = settings.main_process_port
    if port is not None and not 0 <= port <= 65535:
        raise UsageError(f"main_process_port must be between 0 and 65535, got {port}.")
    if settings.num_machines == 1:
        return
    if not 0 <= settings.machine_rank < settings.num_machines:
        raise UsageError(
            f"machine_rank must be between 0 and {settings.num_machines - 1} for {settings.num_machines} machines, "
            f"got {settings.machine_rank}."
        )
    for name in ("main_process_ip", "main_process_port"):
        if not getattr(settings, name):
            raise UsageError(f"{settings.num_machines} machines must know where machine 0 is: give --{name}.")


def _check_agent(settings: Namespace) -> None:
    """Check what torch's elastic agent would otherwise find out with a traceback."""
    if settings.max_restarts < 0:
        raise UsageError(f"max_restarts must not be negative, got {settings.max_restarts}.")
    if settings.monitor_interval <= 0:
        raise UsageError(f"monitor_interval must be above 0 seconds, got {settings.monitor_interval}.")
    if not re.fullmatch(r"[0-3]|(\d+:[0-3],?)+", settings.tee):
        raise UsageError(
            f"tee must be 0, 1, 2 or 3, or pairs like 0:1,1:3 for single processes, got {settings.tee!r}."
        )
    if not re.fullmatch(r"([^=,]+=[^=,]*,?)*", settings.rdzv_conf):
        raise UsageError(f"rdzv_conf must be pairs like timeout=60,read_timeout=30, got {settings.rdzv_conf!r}.")


def _check_precision(settings: Namespace) -> None:
    if str(settings.mixed_precision).lower() != "fp8":
        return
    from accel_state.libraries import is_fp8_available

    if not is_fp8_available():
        raise UsageError(
            "mixed_precision 'fp8' needs torchao, Transformer Engine or MS-AMP, and none of them is installed."
        )


def _check_parallelism(settings: Namespace) -> None:
    if settings.use_parallelism_config and not settings.use_fsdp:
        raise UsageError("--use_parallelism_config needs --use_fsdp --fsdp_version 2.")


def _check_script(settings: Namespace) -> None:
    script = settings.training_script
    if settings.module:
        _check_module(script)
    elif settings.no_python:
        _check_program(script)
    elif script != "-" and not os.path.exists(script):
        folder = os.path.dirname(script) or "."
        siblings = [os.path.join(os.path.dirname(script), name) for name in _names(folder) if name.endswith(".py")]
        hint = did_you_mean(script, siblings) or _other_kind(script)
        raise MissingFileError(f"The script {script!r} does not exist.{hint}")


def _check_module(name: str) -> None:
    import sys
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    top = name.partition(".")[0]
    try:
        found = PathFinder.find_spec(top, [os.getcwd(), *sys.path]) or find_spec(top)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise UsageError(f"There is no module {name!r}: install it, or change to the folder that holds it.")


def _check_program(name: str) -> None:
    import shutil

    if shutil.which(name) is None:
        here = f" Write './{name}' for the file of this folder." if os.path.exists(name) else ""
        raise MissingFileError(f"There is no program {name!r} that can be run.{here}")


def _other_kind(script: str) -> str:
    """Say how to run something that is no file but could be a command or a module."""
    if not re.fullmatch(r"[\w.-]+", script) or script.endswith(".py"):
        return ""
    return f" Write `-m {script}` for a module, or `--no_python {script}` for a program."


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


CHECKS: tuple[Callable[[Namespace], None], ...] = (
    _check_release, _check_processes, _check_machines, _check_agent, _check_precision, _check_parallelism,
    _check_script,
)  # fmt: skip
