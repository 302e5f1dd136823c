"""The command `accelerate config`: writes the config file of this machine."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from accel_cli.arguments import CommandParser, Flag, add_options, command_parser, make_parser
from accel_cli.configfile.location import default_config_path, default_json_config_file
from accel_cli.errors import without_traceback
from accel_state.settings.option import one_of

if TYPE_CHECKING:
    from accel_cli.configfile.schema import BaseConfig

HELP = "Write the launch settings of this machine."
DEFAULT_HELP = "Write settings that use all accelerators of this machine."
UPDATE_HELP = "Bring an old config file up to date."

INTERRUPTED = 130  # the exit status of a program ended by ctrl-C

SETTINGS_FILE = Flag("--config_file", "The config file; the default one if left out.", metavar="FILE")

DEFAULT_OPTIONS = (
    Flag("--config_file", "The file to write.", dest="save_location", default=default_json_config_file,
           metavar="FILE"),
    Flag("--mixed_precision", "Mixed precision dtype.", default="no", kind=one_of("no", "fp16", "bf16")),
)  # fmt: skip


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `accelerate config`, and its own commands."""
    add_options(parser, [SETTINGS_FILE])
    parser.set_defaults(func=config_command)
    commands = parser.add_subparsers(title="commands", metavar="command", dest="subcommand")
    default_command_parser(commands)
    update_command_parser(commands)


def get_config_parser(subparsers: Any = None) -> CommandParser:
    """Build the parser of `accelerate config` and its own commands."""
    return command_parser(subparsers, "config", HELP, add_arguments, config_command)


def config_command_parser(subparsers: Any = None) -> CommandParser:
    """Build the parser of `accelerate config` alone."""
    parser = make_parser(subparsers, "config", HELP)
    add_options(parser, [SETTINGS_FILE])
    parser.set_defaults(func=config_command)
    return parser


def default_command_parser(parser: Any, parents: Any = ()) -> CommandParser:
    """Add `default` to the commands of `accelerate config`.

    Args:
        parser: What `add_subparsers` returned.
        parents: Parsers whose options the command gets, too.
    """
    command = make_parser(parser, "default", DEFAULT_HELP, parents=list(parents))
    add_options(command, DEFAULT_OPTIONS)
    command.set_defaults(func=default_config_command)
    return command


def update_command_parser(parser: Any, parents: Any = ()) -> CommandParser:
    """Add `update` to the commands of `accelerate config`; arguments as in `default_command_parser`."""
    command = make_parser(parser, "update", UPDATE_HELP, parents=list(parents))
    add_options(command, [SETTINGS_FILE])
    command.set_defaults(func=update_config_command)
    return command


def run(args: Namespace) -> int:
    """Run `accelerate config ...`.

    Returns:
        The exit status for the shell.
    """
    try:
        args.func(args)
    except (KeyboardInterrupt, EOFError):  # ctrl-C, ctrl-D
        print("\nInterrupted. Nothing was written.", file=sys.stderr)
        return INTERRUPTED
    return 0


def get_user_input(existing: BaseConfig | None = None) -> BaseConfig:
    """Ask for all settings, with menus on a terminal and in plain lines elsewhere.

    Args:
        existing: Settings whose values are the defaults of the questions.

    Returns:
        `ClusterConfig` or `SageMakerConfig`.

    Raises:
        KeyboardInterrupt: The user interrupts.
        ValueError: The answers end too early.
    """
    from accel_cli.questionnaire.cluster import get_user_input

    return get_user_input(existing=existing)


def config_command(args: Namespace) -> None:
    """Ask for the settings and write them.

    Args:
        args: With `config_file`, the file to write, or None for the default one. The values of an existing file are
            the defaults of the questions. Before it is overwritten, somebody at a terminal is asked.

    Raises:
        ValueError: The file cannot be written, or the answers end too early.
    """
    from accel_cli.configfile.write import check_target, write_config

    path = os.path.expanduser(args.config_file or default_config_path(os.environ))
    check_target(path)
    existing = _existing(path) if os.path.exists(path) else None
    config = get_user_input(existing)
    if os.path.exists(path) and not _may_overwrite(path, existing, config):
        return
    with without_traceback():
        write_config(path, config)
    print(f"\nSettings written to {path}")


def _existing(path: str) -> BaseConfig | None:
    """Read the file that will be overwritten, if it can be read."""
    from accel_cli.configfile.read import load_config_from_file

    try:
        config = load_config_from_file(path)
    except (OSError, ValueError) as error:
        print(f"{path} exists, but its values cannot be the defaults: {error}\n")
        return None
    print(f"{path} exists. Its values are the defaults of the questions.\n")
    return config


def _may_overwrite(path: str, existing: BaseConfig | None, config: BaseConfig) -> bool:
    """Show what changes in an existing file, and ask at a terminal; answers from a pipe have nobody to ask."""
    from accel_cli.questionnaire.answer import Truth
    from accel_cli.questionnaire.previous import changes
    from accel_cli.questionnaire.prompts import choose_prompts, is_terminal
    from accel_cli.questionnaire.question import Question, ask

    lines = ["It cannot be read as a config file."] if existing is None else changes(existing, config)
    if not lines:
        print(f"\nNothing changes in {path}.")
        return False
    print("\n" + "\n".join([f"What changes in {path}:", *(f"  {line}" for line in lines)]))
    if not is_terminal(sys.stdin):
        return True
    if ask(Question("overwrites", f"Overwrite {path}?", Truth(), True), choose_prompts(), {}):
        return True
    print("Nothing was written.")
    return False


def default_config_command(args: Namespace) -> None:
    """Write a config file for this machine, unless it exists."""
    from accel_cli.configfile.write import check_target, write_basic_config

    path = args.save_location
    if path == default_json_config_file:  # the environment may have changed since the import
        path = default_config_path(os.environ)
    check_target(os.path.expanduser(path))
    with without_traceback():
        written = write_basic_config(args.mixed_precision, path, format="yaml")
    if written:
        print(f"Settings written to {written}")


def update_config(args: Namespace) -> str:
    """Update an old config file in place, and print what was changed.

    Args:
        args: With `config_file`, the file, or None for the default one.

    Returns:
        Its path.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It cannot be read, or a value in it is not valid.
    """
    from accel_cli.configfile.update import update

    path = os.path.expanduser(args.config_file or default_config_path(os.environ))
    with without_traceback():
        changes = update(path)
    for change in changes:
        print(change)
    return path


def update_config_command(args: Namespace) -> None:
    """Run `accelerate config update`."""
    path = update_config(args)
    print(f"{path} is up to date")
