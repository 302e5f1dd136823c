"""The command `accelerate launch`."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from typing import Any

from accel_cli.arguments import CommandParser, make_parser
from accel_cli.launch.flags.table import SHOWN_WITH, add_launch_options
from accel_cli.launch.plan import Plan, make_plan
from accel_cli.launch.resolve import resolve
from accel_cli.launch.validate import check_flags, check_settings

HELP = "Run a script on one process or many."
RUNNERS = {"simple": "accel_cli.launch.runners.simple", "torchrun": "accel_cli.launch.runners.torchrun"}


def launch_command_parser(subparsers: Any = None) -> CommandParser:
    """Build the parser of `accelerate launch`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` gave, or None for a parser of its own.
    """
    parser = make_parser(
        subparsers,
        "launch",
        HELP,
        allow_abbrev=False,
        shown_with=SHOWN_WITH,
        usage="accelerate launch [options] script [arguments of the script]",
    )
    add_launch_options(parser)
    if subparsers is not None:
        parser.set_defaults(func=launch_command)
    return parser


def plan_launch(args: Namespace) -> Plan:
    """Check and complete a parsed command line, and plan the launch.

    Raises:
        ValueError: When something is wrong with the command line, the settings file or the environment.
    """
    check_flags(args)
    settings = resolve(args)
    check_settings(settings)
    if not settings.quiet:
        for note in settings.notes:
            print(f"accelerate launch: {note}", file=sys.stderr)
    return make_plan(settings)


def run(args: Namespace) -> int:
    """Carry out `accelerate launch`. A single script takes the place of this process.

    Returns:
        The exit status for the shell.
    """
    plan = plan_launch(args)
    if plan.runner == "simple":
        from accel_cli.launch.runners.simple import become

        become(plan)
    return run_plan(plan)


def run_plan(plan: Plan) -> int:
    """Start what is planned, wait, and return the exit status."""
    from importlib import import_module

    return int(import_module(RUNNERS[plan.runner]).run(plan))


def finish(plan: Plan) -> None:
    """Carry a plan out, and raise when the script fails, as `launch_command` does."""
    status = run_plan(plan)
    if status and plan.quiet:
        sys.exit(status)
    if status:
        raise subprocess.CalledProcessError(status, list(plan.argv))


def launch_command(args: Namespace) -> None:
    """Launch from a Python program, and come back when the script has ended.

    Args:
        args: What the parser of `launch_command_parser` gave.

    Raises:
        ValueError: When something is wrong with the arguments.
        subprocess.CalledProcessError: When the script fails; with `--quiet`, `SystemExit` instead.

    Example:
        ```python
        from accelerate.commands.launch import launch_command, launch_command_parser

        launch_command(launch_command_parser().parse_args(["--cpu", "train.py"]))
        ```
    """
    finish(plan_launch(args))
