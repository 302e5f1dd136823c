"""The program `accelerate`: finds the command and lets it run."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from accel_cli.errors import UsageError


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the program.

    Attributes:
        module: Where it is defined; imported only when the command is asked for.
        parser: Name of the function there that builds its parser.
        run: Name of the function there that carries it out.
        help: What it does, in a few words.
    """

    module: str
    parser: str
    run: str
    help: str

    def make_parser(self, subparsers: Any = None) -> Any:
        """Build the parser, as a command of a program or of its own."""
        return getattr(import_module(self.module), self.parser)(subparsers)

    def execute(self, args: Namespace) -> int:
        """Carry the command out and return the exit status."""
        result = getattr(import_module(self.module), self.run)(args)
        return result if isinstance(result, int) else 0


COMMANDS: dict[str, Command] = {
    "completion": Command(
        "accel_cli.completion.command",
        "completion_command_parser",
        "completion_command",
        "Print a script that completes command lines in your shell.",
    ),
    "config": Command("accel_cli.config", "get_config_parser", "run", "Write the launch settings of this machine."),
    "estimate-memory": Command(
        "accel_cli.estimate.command", "estimate_command_parser", "run", "Estimate the memory that a model needs."
    ),
    "env": Command(
        "accel_cli.env", "env_command_parser", "env_command", "Print versions, devices and settings, for a bug report."
    ),
    "launch": Command(
        "accel_cli.launch.command", "launch_command_parser", "run", "Run a script on one process or many."
    ),
    "merge-weights": Command(
        "accel_cli.merge", "merge_command_parser", "merge_command", "Merge the weights of a sharded checkpoint."
    ),
    "runs": Command(
        "accel_cli.runs.command",
        "runs_command_parser",
        "runs_command",
        "List, show, compare and export recorded runs.",
    ),
    "slurm": Command(
        "accel_cli.slurm.command", "slurm_command_parser", "slurm_command", "Write or submit a SLURM job for a launch."
    ),
    "tpu-config": Command("accel_cli.tpu", "tpu_command_parser", "run", "Run commands on every machine of a TPU pod."),
    "test": Command(
        "accel_cli.selftest", "test_command_parser", "test_command", "Check that launching works on this machine."
    ),
    "to-fsdp2": Command(
        "accel_cli.to_fsdp2",
        "to_fsdp2_command_parser",
        "to_fsdp2_command",
        "Convert a settings file from FSDP 1 to FSDP 2.",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: The words of the command line without the program's name; those of this process when None.

    Returns:
        The exit status for the shell: 0 when all went well, 1 without a command, 2 for what cannot be done,
        otherwise that of the script.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return run_command(words[0], words[1:])
    if words and words[0] in ("--version", "-V"):
        print(_versions())
        return 0
    if words and not words[0].startswith("-"):
        print(f"accelerate: error: {_no_command(words[0])}", file=sys.stderr)
        sys.exit(2)  # as for other words that cannot be parsed
    parser = full_parser(with_options=not words)
    parser.parse_args(words)  # exits for --help and for an unknown flag
    parser.print_help()
    return 1


def _versions() -> str:
    """What is installed: the umbrella where it is there, and the package that runs the commands."""
    from importlib.metadata import PackageNotFoundError, version

    own = f"accel-cli {version('accel-cli')}"
    try:
        return f"accelerate {version('accelerate')} ({own})"
    except PackageNotFoundError:
        return own


def _no_command(word: str) -> str:
    """Say what somebody may have meant who named no command."""
    if word.endswith(".py"):
        return f"{word!r} is no command. Run a script with: accelerate launch {word}"
    from accel_cli.errors import did_you_mean

    hint = did_you_mean(word, list(COMMANDS)) or f" There are {', '.join(COMMANDS)}."
    return f"{word!r} is no command.{hint}"


def run_command(name: str, words: Sequence[str] | None = None) -> int:
    """Parse the words that belong to one command and carry it out; those of this process when None."""
    command = COMMANDS[name]
    args = command.make_parser().parse_args(words)
    try:
        with _siblings_named():
            return command.execute(args)
    except UsageError as error:
        if getattr(args, "debug", None):
            import traceback

            traceback.print_exc()
        print(f"accelerate {name}: error: {error}", file=sys.stderr)
        return 2


@contextmanager
def _siblings_named() -> Iterator[None]:
    """Say which of our packages a command needs, where this one was installed without it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package.startswith("accel") or find_spec(package) is not None:
            raise
        distribution = package.replace("_", "-")
        raise UsageError(
            f"This command needs {distribution}, which is not installed. Run: pip install {distribution}"
        ) from error


def full_parser(*, with_options: bool = True) -> Any:
    """Build the parser of the whole program.

    Args:
        with_options: Whether the commands have their options; the names are enough for the list in `--help`.
    """
    from accel_cli.arguments import CommandParser, make_parser

    parser = CommandParser(
        "accelerate", usage="accelerate <command> [<args>]", description="Start and configure training programs.",
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("-V", "--version", action="store_true", help="Show the versions that are installed.")
    commands = parser.add_subparsers(title="commands", metavar="command")
    for name, command in COMMANDS.items():
        if with_options:
            command.make_parser(commands)
        else:
            make_parser(commands, name, command.help)
    return parser


def console(name: str) -> Callable[[], int]:
    """Make the entry point of a program that is one command only."""

    def entry() -> int:
        return run_command(name)

    entry.__doc__ = f"Run `accelerate {name}`."
    return entry


launch_main = console("launch")
config_main = console("config")
env_main = console("env")
estimate_main = console("estimate-memory")
merge_main = console("merge-weights")
tpu_main = console("tpu-config")
test_main = console("test")
to_fsdp2_main = console("to-fsdp2")

if __name__ == "__main__":
    sys.exit(main())
