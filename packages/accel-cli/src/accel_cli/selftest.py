"""The command `accelerate test`: launches a script that checks training and collectives on this machine, or the grid."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from typing import Any

from accel_cli.arguments import CommandParser, Flag, add_options, command_parser, switch
from accel_cli.errors import UsageError

HELP = "Check that launching works on this machine."
SCRIPTS = ("test_utils", "scripts")  # in the package `accelerate`

OPTIONS = (
    Flag("--config_file", "Config file to use instead of the default one.", metavar="FILE"),
    switch("--grid", "Compare losses, gradient norms and updates of a script under each engine on 1 to 4 CPU ranks with one process."),
    Flag("--only", "Configurations of --grid, separated by commas, such as ddp-2,fsdp2-4; all if left out.", metavar="NAMES"),
    Flag("script", "With --grid: the training script, instead of a bundled one.", nargs="?", metavar="script"),
    Flag("script_args", "Its arguments.", nargs="...", metavar="..."),
)  # fmt: skip


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `accelerate test`."""
    add_options(parser, OPTIONS)


def test_command_parser(subparsers: Any = None) -> CommandParser:  # noqa: PT028 - not a test
    """Build the parser of `accelerate test`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` gave, or None for a parser of its own.
    """
    return command_parser(subparsers, "test", HELP, add_arguments, test_command)


def test_command(args: Namespace) -> int:
    """Launch the checks as `accelerate launch` launches any script, and print the result.

    Args:
        args: With `config_file`, the config file, or None for the default one.

    Returns:
        The exit status for the shell: 0 if nothing failed.

    Raises:
        ValueError: The settings are not valid.
        FileNotFoundError: The config file of `--config_file` does not exist.
    """
    from accel_cli.launch.command import launch_command_parser, run_plan, settle

    named = ["--config_file", args.config_file] if args.config_file is not None else []
    status = run_plan(settle(launch_command_parser().parse_args([*named, "--quiet", script_path()]))[1])
    if status:
        print(f"accelerate test: failed with exit status {status}.", file=sys.stderr)
    else:
        print("Launching works on this machine.")
    return status


def run(args: Namespace) -> int:
    """Run `accelerate test`.

    Returns:
        The exit status for the shell.

    Raises:
        ValueError: The options or the settings are not valid.
    """
    _check_options(args)
    if not args.grid:
        return test_command(args)
    from accel_cli.grid.command import run_grid

    return run_grid([args.script or script_path("gradient_grid.py"), *args.script_args], args.only)


def _check_options(args: Namespace) -> None:
    if args.grid and args.config_file is not None:
        raise UsageError(
            f"--config_file {args.config_file} has no effect with --grid, each of whose configurations has settings of its own. Leave it out."
        )
    for name, value in {"--only": args.only, "a script": args.script}.items():
        if value is not None and not args.grid:
            raise UsageError(
                f"accelerate test takes {name} ({value!r}) with --grid alone. Add --grid, or leave it out."
            )


def script_path(name: str = "test_script.py") -> str:
    """Find a bundled script, without importing its package.

    Args:
        name: Of its file.

    Raises:
        ValueError: The package `accelerate`, which has it, is not installed.
    """
    from importlib.util import find_spec

    spec = find_spec("accelerate")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            "`accelerate test` needs the package accelerate, which is not installed. Run: pip install accelerate"
        )
    return os.path.join(spec.submodule_search_locations[0], *SCRIPTS, name)
