"""The program `accelerate`: finds the command and runs it."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from signal import SIGINT
from typing import Any

from accel_cli.errors import UsageError
from accel_cli.extensions import COMMANDS_GROUP, entry_points


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the program.

    Attributes:
        name: Its name on the command line.
        module: Where it is defined, with `add_arguments(parser)` and `run(args)`; imported only when the command is
            used.
        help: What it does, in a few words.
        install: What to install for libraries that it lacks, as for pip; each by its own name if empty.
    """

    name: str
    module: str
    help: str
    install: str = ""

    def make_parser(self, subparsers: Any = None) -> Any:
        """Build the parser: as a command of a program with all options, or a separate one."""
        from accel_cli.arguments import make_parser

        module = import_module(self.module)
        parser = make_parser(subparsers, self.name, self.help)
        module.add_arguments(parser)
        if subparsers is not None:
            parser.add_late_options()
            parser.set_defaults(func=module.run)
        return parser

    def execute(self, args: Namespace) -> int:
        """Run the command and return the exit status."""
        result = import_module(self.module).run(args)
        return result if isinstance(result, int) else 0


_COMMANDS = (
    Command(
        "completion", "accel_cli.completion.command", "Print a script that completes command lines in your shell."
    ),
    Command("config", "accel_cli.config", "Write the launch settings of this machine."),
    Command(
        "estimate-memory",
        "accel_cli.estimate.command",
        "Estimate the memory that a model needs.",
        install="'accel-cli[estimate]'",
    ),
    Command("env", "accel_cli.env", "Print versions, devices and settings, for a bug report."),
    Command("examples", "accel_cli.examples.command", "List the examples, or copy one into a folder."),
    Command("kubernetes", "accel_cli.kubernetes.command", "Print a launch as a manifest for Kubernetes."),
    Command("launch", "accel_cli.launch.command", "Run a script on one process or many."),
    Command(
        "merge-weights", "accel_cli.merge", "Merge the weights of a sharded checkpoint.", install="'accel-cli[merge]'"
    ),
    Command("rehearse", "accel_cli.rehearse.command", "Run a script on a cluster that is not there."),
    Command("runs", "accel_cli.runs.command", "List, show, compare and export recorded runs."),
    Command("slurm", "accel_cli.slurm.command", "Write or submit a SLURM job for a launch."),
    Command("tpu-config", "accel_cli.tpu", "Run commands on every machine of a TPU pod."),
    Command("test", "accel_cli.selftest", "Check that launching works on this machine."),
    Command("to-fsdp2", "accel_cli.to_fsdp2", "Convert a config file from FSDP 1 to FSDP 2."),
)
LIBRARIES = ("accel", "huggingface_hub", "timm", "transformers")
"""Beginnings of the names of modules that commands may lack; others are missing to a user's program."""

COMMANDS: dict[str, Command] = {command.name: command for command in _COMMANDS}


def foreign_commands() -> dict[str, Command]:
    """Find the commands of installed packages: modules that are entry points of the group `accelerate.commands`."""
    entries = entry_points(COMMANDS_GROUP)
    return {
        name: Command(name, module, "A command of an installed package.")
        for name, module in entries.items()
        if name not in COMMANDS
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: The command line without the program's name; that of this process when None.

    Returns:
        The exit status for the shell: 0 on success, 1 without a command, 2 for a usage error, otherwise that of the
        script.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return run_command(words[0], words[1:])
    if words and words[0] in ("--version", "-V"):
        print(_versions())
        return 0
    if words and not words[0].startswith("-"):
        if words[0] in foreign_commands():
            return run_command(words[0], words[1:])
        _print_error(f"accelerate: error: {_no_command(words[0])}")
        sys.exit(2)  # as argparse does for other errors
    parser = full_parser(with_options=not words)
    parser.parse_args(words)  # exits for --help and for an unknown flag
    parser.print_help()
    return 1


def _versions() -> str:
    """The installed versions of the umbrella package, if there is one, and of the package of the commands."""
    from importlib.metadata import PackageNotFoundError, version

    own = f"accel-cli {version('accel-cli')}"
    try:
        return f"accelerate {version('accelerate')} ({own})"
    except PackageNotFoundError:
        return own


def _no_command(word: str) -> str:
    """The message for an unknown command, with a suggestion."""
    if word.endswith(".py"):
        return f"{word!r} is not a command. To run a script, write: accelerate launch {word}"
    from accel_cli.errors import did_you_mean

    known = [*COMMANDS, *foreign_commands()]
    hint = did_you_mean(word, known) or f" The commands are {', '.join(known)}."
    return f"{word!r} is not a command.{hint}"


def run_command(name: str, words: Sequence[str] | None = None) -> int:
    """Parse the arguments of one command and run it; by default those of this process."""
    command = COMMANDS.get(name) or foreign_commands()[name]
    _print_anything()
    args = command.make_parser().parse_args(words)
    try:
        with _libraries_named(command):
            status = command.execute(args)
            sys.stdout.flush()  # here, where an error can be caught
            return status
    except BrokenPipeError:
        return _end_for_closed_pipe()
    except KeyboardInterrupt:  # whoever sent it needs no stack, which is a hundred lines while torch is imported
        return 128 + SIGINT
    except UsageError as error:
        if getattr(args, "debug", None):
            import traceback

            traceback.print_exc()
        _print_error(f"accelerate {name}: error: {error}")
        return 2


def _print_error(text: str) -> None:
    from accel_cli.color import paint

    print(paint(text, sys.stderr), file=sys.stderr)


def _print_anything() -> None:
    """Escape characters that the terminal's encoding lacks, such as those of a path under the C locale: nothing fails over them."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's has none
            stream.reconfigure(errors="backslashreplace")


def _end_for_closed_pipe() -> int:
    """Write nothing more, because who reads our output has ended, as `head` does; the exit status of a program that SIGPIPE ends."""
    with suppress(OSError, ValueError):  # standard output is no file, as in a notebook
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


@contextmanager
def _libraries_named(command: Command) -> Iterator[None]:
    """Name the library that a command needs, if it is not installed beside this package."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package.startswith(LIBRARIES) or find_spec(package) is not None:
            raise
        distribution = package.replace("_", "-")
        raise UsageError(
            f"This command needs {distribution}, which is not installed. Run: pip install {command.install or distribution}"
        ) from error


def full_parser(*, with_options: bool = True) -> Any:
    """Build the parser of the whole program.

    Args:
        with_options: Whether to add the options of the commands; `--help` needs only their names.
    """
    from accel_cli.arguments import CommandParser, make_parser

    parser = CommandParser(
        "accelerate", usage="accelerate <command> [<args>]", description="Start and configure training programs.",
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("-V", "--version", action="store_true", help="Show the versions that are installed.")
    commands = parser.add_subparsers(title="commands", metavar="command")
    for name, command in (COMMANDS | foreign_commands()).items():
        if with_options:
            command.make_parser(commands)
        else:
            make_parser(commands, name, command.help)
    return parser


def console(name: str) -> Callable[[], int]:
    """Make the entry point of a program that runs a single command."""

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
