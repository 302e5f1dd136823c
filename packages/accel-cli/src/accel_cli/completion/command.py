"""The command `accelerate completion`: a script that lets a shell complete command lines."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module
from typing import Any

from accel_cli.arguments import CommandParser, Option, make_parser
from accel_state.settings.option import one_of

HELP = "Print a script that completes command lines in your shell."
SHELLS = ("bash", "zsh", "fish")
PROGRAMS = (
    "accelerate", "accelerate-config", "accelerate-estimate-memory", "accelerate-launch", "accelerate-merge-weights",
)  # fmt: skip

DESCRIPTION = """Print a script that completes command lines in your shell:
bash: eval "$(accelerate completion bash)" in ~/.bashrc;
zsh: eval "$(accelerate completion zsh)" in ~/.zshrc, after compinit;
fish: accelerate completion fish > ~/.config/fish/completions/accelerate.fish."""


def completion_command_parser(subparsers: Any = None) -> CommandParser:
    """Build the parser of `accelerate completion`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` gave, or None for a parser of its own.
    """
    options = (Option("shell", "The shell.", kind=one_of(*SHELLS)),)
    parser = make_parser(subparsers, "completion", HELP, options, description=DESCRIPTION)
    if subparsers is not None:
        parser.set_defaults(func=completion_command)
    return parser


def completion_command(args: Namespace) -> None:
    """Print the script for a shell.

    Args:
        args: With `shell`, one of `SHELLS`.
    """
    print(completion_script(args.shell))


def completion_script(shell: str) -> str:
    """Write the script that makes a shell complete every command, flag and value.

    Args:
        shell: One of `SHELLS`.
    """
    from accel_cli.completion.tables import tables
    from accel_cli.completion.words import read_words
    from accel_cli.main import full_parser

    module = import_module(f"accel_cli.completion.{shell}")
    head = [module.HEAD] if hasattr(module, "HEAD") else []
    parts = [*head, tables(list(read_words(full_parser())), module.DIALECT), module.DRIVER]
    return "\n\n".join(parts).replace("{programs}", " ".join(PROGRAMS))
