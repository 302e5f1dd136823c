"""The command `accelerate completion`: prints a completion script for a shell."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module

from accel_cli.arguments import CommandParser, Flag, add_options
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


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `accelerate completion`."""
    parser.description = DESCRIPTION
    add_options(parser, (Flag("shell", "The shell.", kind=one_of(*SHELLS)),))


def run(args: Namespace) -> None:
    """Print the script for a shell.

    Args:
        args: With `shell`, one of `SHELLS`.
    """
    print(completion_script(args.shell))


def completion_script(shell: str) -> str:
    """Make the completion script of a shell, for every command, flag and value.

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
