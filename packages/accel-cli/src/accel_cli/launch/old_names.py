"""What accelerate 1.x offers programs that build launches themselves."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any, NoReturn

from accel_cli.errors import NotInThisReleaseError
from accel_cli.launch.command import finish
from accel_cli.launch.flags.fp8 import FP8
from accel_cli.launch.flags.group import OptionGroup
from accel_cli.launch.flags.parallelism import CONTEXT, PARALLELISM, SEQUENCE
from accel_cli.launch.flags.table import GROUPS
from accel_cli.launch.plan import Plan, environment, make_plan, script_command, single_environment
from accel_cli.launch.resolve import resolve

options_to_group = {group.shown_with.lstrip("-"): group.title for group in GROUPS if group.shown_with}


def clean_option(option: str) -> str | None:
    """Turn a long flag into the name of its value: `--num-processes` into `num_processes`; None for other words."""
    return option[2:].replace("-", "_") if option.startswith("--") else None


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """Return the value of a variable that holds paths, with one more at its end; the variable stays as it is."""
    paths = [path for path in os.environ.get(env_var_name, "").split(os.pathsep) if path]
    return os.pathsep.join([*paths, str(path_to_add)])


def prepare_simple_launcher_cmd_env(args: Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command for one process, and its whole environment.

    Args:
        args: The parsed command line of `accelerate launch`.
    """
    settings = resolve(args)
    variables = environment(settings, os.environ) | single_environment(settings)
    return script_command(settings), {**os.environ, **variables}


def prepare_multi_gpu_env(args: Namespace) -> dict[str, str]:
    """Return the whole environment of a process that torch's elastic agent starts.

    Args:
        args: The parsed command line of `accelerate launch`.
    """
    return {**os.environ, **environment(resolve(args), os.environ)}


def setup_fp8_env(args: Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the variables of training in FP8 to `current_env`, and return it."""
    return _add(current_env, args, FP8)


def prepare_extend_env_parallelism_config(args: Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the variables of combined parallelism to `current_env`, and return it."""
    return _add(current_env, args, PARALLELISM, CONTEXT, SEQUENCE)


def _add(current_env: dict[str, str], args: Namespace, *groups: OptionGroup) -> dict[str, str]:
    current_env |= {variable: text for group in groups for _, variable, text in group.variables(args)}
    return current_env


def simple_launcher(args: Namespace) -> None:
    """Run the script in one process and wait.

    Raises:
        subprocess.CalledProcessError: When it fails; with `--quiet`, `SystemExit` instead.
    """
    command, variables = prepare_simple_launcher_cmd_env(args)
    finish(Plan("simple", tuple(command), variables, quiet=bool(args.quiet)))


def multi_gpu_launcher(args: Namespace) -> None:
    """Run the script in several processes, under torch's elastic agent, and wait; raises as `simple_launcher`."""
    settings = resolve(args)
    settings.runner = "torchrun"
    finish(make_plan(settings))


def _refuse(what: str) -> NoReturn:
    raise NotInThisReleaseError(f"This release cannot {what} yet.")


def deepspeed_launcher(args: Namespace) -> NoReturn:
    """Refuse: not part of this release."""
    _refuse("train with DeepSpeed")


def tpu_launcher(args: Namespace) -> NoReturn:
    """Refuse: not part of this release."""
    _refuse("start TPU processes")


def tpu_pod_launcher(args: Namespace) -> NoReturn:
    """Refuse: not part of this release."""
    _refuse("start processes on a TPU pod")


def sagemaker_launcher(sagemaker_config: Any, args: Namespace) -> NoReturn:
    """Refuse: not part of this release."""
    _refuse("start jobs on Amazon SageMaker")


def prepare_deepspeed_cmd_env(args: Namespace) -> NoReturn:
    """Refuse: not part of this release."""
    _refuse("train with DeepSpeed")


def prepare_tpu(args: Namespace, current_env: dict[str, str], pod: bool = False) -> NoReturn:
    """Refuse: not part of this release."""
    _refuse("start TPU processes")


def prepare_sagemager_args_inputs(sagemaker_config: Any, args: Namespace) -> NoReturn:
    """Refuse: not part of this release."""
    _refuse("start jobs on Amazon SageMaker")
