"""The command `accelerate launch`."""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from accel_cli.arguments import CommandParser, command_parser, switch
from accel_cli.launch.flags.table import SHOWN_WITH, add_launch_options, is_option
from accel_cli.launch.settings import CHECK_GRADIENTS, LaunchSettings
from accel_cli.launch.values import coerce

if TYPE_CHECKING:
    from accel_cli.launch.plan import Plan


LARGEST_SCRIPT_BYTES = 1_000_000
# parsers whose flags need not be spelled in the script: from dataclasses and signatures, config files or hand-written loops
PARSES_OTHERWISE = re.compile(
    r"\b(HfArgumentParser|TrlParser|parse_known_args|argv|parents|hydra|fire|click|typer|tyro|absl|docopt|jsonargparse"
    r"|simple_parsing|draccus|import\s.*\b(args|parse\w*|get_args|get_parser))\b|import \*"
)


def misplaced_flags(settings: LaunchSettings) -> tuple[str, ...]:
    """Return a note about flags of the launcher that the script neither names nor can parse, as far as its text says.

    Scripts with an option of the same name, as many have for `--mixed_precision`, and scripts that leave parsing to
    a library or to another file get none.

    Args:
        settings: The settings of a launch.
    """
    words = [word.partition("=")[0] for word in settings.training_script_args if word.startswith("--")]
    names = {word: word.strip("-").replace("-", "_") for word in words if len(word) > 2}
    flags = {word: name for word, name in names.items() if is_option(name)}
    text = _text(settings) if flags else ""
    if "Accelerator(" not in text or PARSES_OTHERWISE.search(text):
        return ()
    unread = [word for word, name in flags.items() if not re.search(rf"--{name.replace('_', '[-_]')}\b", text)]
    if not unread:
        return ()
    script = settings.training_script
    return (
        f"{' and '.join(dict.fromkeys(unread))} came after {script}, which gets it but has no such option. To set it for "
        f"the launch, put it before the script: accelerate launch {unread[0]} ... {script}",
    )


def _text(settings: LaunchSettings) -> str:
    """The script's text; empty if the launch runs something else."""
    if settings.module or settings.no_python or not settings.training_script.endswith(".py"):
        return ""
    try:
        with open(settings.training_script, encoding="utf-8", errors="replace") as file:
            return file.read(LARGEST_SCRIPT_BYTES)
    except OSError:
        return ""


HELP = "Run a script on one process or many."

# every other plan is a command of its own
RUNNERS = {"local": "accel_cli.launch.runners.local", "torchrun": "accel_cli.launch.runners.torchrun"}
COMMAND_RUNNER = "accel_cli.launch.runners.simple"


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `accelerate launch`."""
    parser.allow_abbrev = False
    parser.shown_with |= SHOWN_WITH
    parser.usage = "accelerate launch [--help_all] [options] script [arguments of the script]"
    parser.description = f"{HELP} These are the options most used; --help_all shows all of them, by group."
    parser.epilog = (
        "--num-processes is read as --num_processes, and every other flag may be spelled with hyphens, too."
    )
    add_launch_options(parser)


def launch_command_parser(subparsers: Any = None) -> CommandParser:
    """Build the parser of `accelerate launch`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` returned, or None for a separate parser.
    """
    return command_parser(subparsers, "launch", HELP, add_arguments, launch_command)


def settle(args: Namespace) -> tuple[LaunchSettings, Plan]:
    """Check and resolve a parsed command line, and plan the launch.

    Returns:
        The settings, and the plan.

    Raises:
        ValueError: The command line, the config file or the environment is not valid.
    """
    # imported here, so that `--help` does not load them
    from accel_cli.launch.command import misplaced_flags
    from accel_cli.launch.libraries import check_libraries
    from accel_cli.launch.machine import Machine
    from accel_cli.launch.plan import make_plan
    from accel_cli.launch.resolve import complete, from_namespace, read_settings
    from accel_cli.launch.runners.sagemaker import check_credentials
    from accel_cli.launch.validate import check_flags, check_script, check_settings, only_warn_in_dry_run

    check_flags(from_namespace(args))
    settings = read_settings(args, os.environ)
    check_script(settings)  # before the accelerators are counted, which takes seconds
    settings = complete(settings, os.environ, Machine())
    notes = [*settings.notes, *check_settings(settings), *misplaced_flags(settings)]
    for check in (check_libraries, check_credentials):
        notes += only_warn_in_dry_run(check, settings)
    if not settings.quiet:
        for note in notes:
            print(f"accelerate launch: {note}", file=sys.stderr)
    return settings, make_plan(settings)


def run(args: Namespace) -> int:
    """Run `accelerate launch`. A single command replaces this process (exec).

    With `ACCELERATE_CHECK_GRADIENTS=1`, the first step is compared with one process before that.

    Returns:
        The exit status for the shell.
    """
    settings, plan = settle(args)
    if args.dry_run:
        from accel_cli.launch.show import show

        print(show(settings, plan))
        return 0
    if _checks_gradients():
        from accel_cli.grid.launch_check import check_launch

        if status := check_launch(settings):
            return status
    if plan.runner not in RUNNERS and not plan.files:
        from accel_cli.launch.runners.simple import become

        become(plan)
    return run_plan(plan)


def _checks_gradients() -> bool:
    """Whether the environment variable asks to compare the first step with one process before the run."""
    text = os.environ.get(CHECK_GRADIENTS)
    return bool(text and coerce(switch("--check_gradients", ""), text, f"environment variable {CHECK_GRADIENTS}"))


def run_plan(plan: Plan) -> int:
    """Start the processes of a plan, wait, and return the exit status."""
    from importlib import import_module

    run_it = import_module(RUNNERS.get(plan.runner, COMMAND_RUNNER)).run
    if not plan.files:
        return int(run_it(plan))
    from accel_cli.launch.files import present

    with present(plan.files):
        return int(run_it(plan))


def finish(plan: Plan) -> None:
    """Run a plan, and raise if the script fails, as `launch_command` does."""
    status = run_plan(plan)
    if status and plan.quiet:
        sys.exit(status)
    if status:
        import subprocess

        raise subprocess.CalledProcessError(status, list(plan.argv))


def launch_command(args: Namespace) -> None:
    """Launch from a Python program, and return when the script has ended.

    Args:
        args: The parsed arguments of `launch_command_parser`.

    Raises:
        ValueError: The arguments are not valid.
        subprocess.CalledProcessError: The script failed; with `--quiet`, `SystemExit` instead.

    Example:
        ```python
        from accelerate.commands.launch import launch_command, launch_command_parser

        launch_command(launch_command_parser().parse_args(["--cpu", "train.py"]))
        ```
    """
    if args.dry_run:
        run(args)
    else:
        finish(settle(args)[1])
