"""The command `accelerate config`: the settings of this machine."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

from accel_cli.arguments import CommandParser, Option, make_parser
from accel_cli.configfile.location import default_config_path, default_json_config_file
from accel_cli.errors import NotInThisReleaseError, without_traceback
from accel_cli.later import NOTICE

HELP = "Write the launch settings of this machine."
DEFAULT_HELP = "Write settings that use everything this machine has."
UPDATE_HELP = f"Bring an old settings file up to date {NOTICE}."

SETTINGS_FILE = Option("--config_file", "The settings file; the default one if left out.", metavar="FILE")

DEFAULT_OPTIONS = (
    Option("--config_file", "The file to write.", dest="save_location", default=default_json_config_file,
           metavar="FILE"),
    Option("--mixed_precision", "Number format to compute in.", default="no", choices=("no", "fp16", "bf16")),
)  # fmt: skip


def get_config_parser(subparsers: Any = None) -> CommandParser:
    """Build the parser of `accelerate config` and its own commands."""
    parser = config_command_parser(subparsers)
    commands = parser.add_subparsers(title="commands", metavar="command", dest="subcommand")
    default_command_parser(commands)
    update_command_parser(commands)
    return parser


def config_command_parser(subparsers: Any = None) -> CommandParser:
    """Build the parser of `accelerate config` alone."""
    parser = make_parser(subparsers, "config", HELP, [SETTINGS_FILE])
    parser.set_defaults(func=config_command)
    return parser


def default_command_parser(parser: Any, parents: Any = ()) -> CommandParser:
    """Add `default` to the commands of `accelerate config`.

    Args:
        parser: What `add_subparsers` gave.
        parents: Parsers whose options the command gets, too.
    """
    command = make_parser(parser, "default", DEFAULT_HELP, DEFAULT_OPTIONS, parents=list(parents))
    command.set_defaults(func=default_config_command)
    return command


def update_command_parser(parser: Any, parents: Any = ()) -> CommandParser:
    """Add `update` to the commands of `accelerate config`; arguments as in `default_command_parser`."""
    command = make_parser(parser, "update", UPDATE_HELP, [SETTINGS_FILE], parents=list(parents))
    command.set_defaults(func=update_config_command)
    return command


def run(args: Namespace) -> None:
    """Carry out `accelerate config ...`."""
    args.func(args)


def default_config_command(args: Namespace) -> None:
    """Write the settings of this machine, unless there are some already."""
    from accel_cli.configfile.write import write_basic_config

    path = args.save_location
    if path == default_json_config_file:  # the environment may have changed since the import
        path = default_config_path(os.environ)
    with without_traceback():
        written = write_basic_config(args.mixed_precision, path)
    if written:
        print(f"Settings written to {written}")


def config_command(args: Namespace) -> None:
    """Refuse: the questions are not part of this release."""
    raise NotInThisReleaseError(
        "The questions of `accelerate config` are not part of this release yet: `accelerate config default` writes "
        "settings for this machine."
    )


def update_config_command(args: Namespace) -> None:
    """Refuse: updating is not part of this release."""
    raise NotInThisReleaseError("`accelerate config update` is not part of this release yet.")
