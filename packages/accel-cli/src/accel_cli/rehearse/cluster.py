"""Starting a rehearsal: one process, in the environment that a launch would give a rank."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping

from accel_cli.arguments import Flag
from accel_cli.errors import UsageError
from accel_cli.launch.later import launch_arguments, resolve_later
from accel_cli.launch.plan import environment
from accel_cli.launch.settings import LaunchSettings
from accel_cli.launch.validate import check_script, check_settings
from accel_cli.rehearse.result import Result
from accel_state.clusters import DEFAULT_PORT, ClusterPlace

ON_THE_CPU = {"ACCELERATE_USE_CPU": "true", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
"""A rank computes shapes alone; what would be compiled is rehearsed as it is."""

NOT_REHEARSED = {  # a setting -> what to do instead
    "use_megatron_lm": "--use_megatron_lm: Megatron-LM needs CUDA. Rehearse tensor parallelism with --use_parallelism_config.",
    "tpu": "--tpu: programs for XLA are compiled. Leave it out to rehearse the script on another device.",
    "sagemaker": "SageMaker: rehearse with --num_processes and --num_machines of your own.",
    "no_python": "--no_python: only Python scripts can be rehearsed.",
}


class RehearsalFailedError(Exception):
    """The script failed, and has said why.

    Args:
        status: Its exit status.
        reason: The last line that it printed; empty where the user has seen it.
    """

    def __init__(self, status: int, reason: str = "") -> None:
        reason = re.sub(r"^(accelerate rehearse: error|\[rank\d+\]): ", "", reason)
        super().__init__(reason or f"The script ended with status {status}.")
        self.status = status


def settle(args: Namespace, options: tuple[Flag, ...], environ: Mapping[str, str] | None = None) -> LaunchSettings:
    """Check and resolve a command line, as the launch on the first machine would.

    Args:
        args: The parsed arguments.
        options: Those of the command alone.
        environ: The environment variables; those of this process when None.

    Raises:
        ValueError: The command line, the config file or the environment is not valid, or cannot be rehearsed.
    """
    launch = launch_arguments(args, options)
    machines = max(1, args.num_machines or 1)
    per_machine = max(1, (args.num_processes or machines) // machines)
    settings = resolve_later(launch, environ, per_machine, "rehearse", {"main_process_port": DEFAULT_PORT})
    check_script(settings)
    for name, advice in NOT_REHEARSED.items():
        if getattr(settings, name):
            raise UsageError(f"Cannot rehearse {advice}")
    if str(settings.mixed_precision).lower() == "fp8":
        raise UsageError(
            "Cannot rehearse --mixed_precision fp8: its kernels need a GPU. Rehearse bf16, an upper bound of its memory."
        )
    if not 0 <= args.rank < settings.num_processes:
        raise UsageError(
            f"--rank must be at least 0 and less than the {settings.num_processes} processes, got {args.rank}."
        )
    return settings.with_changes(notes=[*settings.notes, *check_settings(settings)])


def rank_environment(settings: LaunchSettings, rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a rank."""
    world_size, per_machine = settings.num_processes, settings.num_processes // settings.num_machines
    rank_info = ClusterPlace("torchrun", rank, world_size, rank % per_machine, per_machine, "127.0.0.1", DEFAULT_PORT)
    variables = rank_info.torch_variables() if world_size > 1 else {}
    return environment(settings, environ) | variables | ON_THE_CPU


def rehearse(
    settings: LaunchSettings, args: Namespace, environ: Mapping[str, str] = os.environ, is_quiet: bool = False
) -> Result:
    """Run the script as one rank. What it prints comes on standard error.

    Args:
        settings: The resolved settings.
        args: The parsed arguments.
        environ: The environment variables.
        is_quiet: Print nothing; the last line of an error is in the exception.

    Raises:
        RehearsalFailedError: The script failed, or cannot be rehearsed; why is on standard error.
    """
    options = {
        "module": bool(settings.module), "device": args.device, "rank": args.rank, "world_size": settings.num_processes,
        "machines": settings.num_machines, "steps": args.steps, "values": args.values, "fake_data": args.fake_data,
        "find_batch_size": args.find_batch_size,
    }  # fmt: skip
    descriptor, path = tempfile.mkstemp(suffix=".json", prefix="rehearsal-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(options, file)
        words = [
            sys.executable,
            "-m",
            "accel_cli.rehearse.rank",
            path,
            settings.training_script,
            *settings.training_script_args,
        ]
        done = subprocess.run(
            words,
            env={**environ, **rank_environment(settings, args.rank, environ)},
            stdout=subprocess.DEVNULL if is_quiet else sys.stderr.fileno(),
            stderr=subprocess.PIPE if is_quiet else None,
            text=True,
        )
        if done.returncode:
            raise RehearsalFailedError(done.returncode, (done.stderr or "").strip().rpartition("\n")[2])
        with open(path, encoding="utf-8") as file:
            return Result.from_dict(json.load(file))
    finally:
        os.unlink(path)
