"""The words that a command line may have at each position, read from the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from accel_cli.launch.flags.table import find

# completed by the shell itself
FILE, FOLDER, ANYTHING = ":file", ":folder", ":anything"

KINDS = {
    "FILE": FILE,
    "FOLDER": FOLDER,
    "training_script": FILE,
    "deepspeed_config_file": FILE,
    "offload_optimizer_nvme_path": FOLDER,
    "offload_param_nvme_path": FOLDER,
    "checkpoint_directory": FOLDER,
    "output_path": FOLDER,
    "model_name": FOLDER,
}
TRUTH = ("true", "false")


@dataclass(frozen=True, slots=True)
class CompletedFlag:
    """A flag of a command.

    Attributes:
        spelling: With underscores; a short one as it is.
        help: What it does.
        values: The words that may follow; `FILE`, `FOLDER` or `ANYTHING`; nothing for a flag without a value.
    """

    spelling: str
    help: str
    values: tuple[str, ...]


@dataclass(slots=True)
class Words:
    """The subcommands, flags and arguments of a command.

    Attributes:
        path: Its name, with that of the command it belongs to; empty for the program.
        commands: Its subcommands, and their help.
        flags: Its flags.
        argument: Its positional argument, as in `CompletedFlag.values`.
        runs_another: Whether everything after its first argument is for another program.
    """

    path: str
    commands: dict[str, str] = field(default_factory=dict)
    flags: list[CompletedFlag] = field(default_factory=list)
    argument: tuple[str, ...] = ()
    runs_another: bool = False


def read_words(parser: argparse.ArgumentParser, path: str = "") -> Iterator[Words]:
    """Yield the words of a program and each of its commands.

    Args:
        parser: The parser of the program.
        path: The command of this parser.
    """
    words = Words(path)
    below: list[tuple[str, Any]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = list(action.choices.items())
            words.commands = {choice.dest: choice.help or "" for choice in action._choices_actions}
        elif action.nargs == argparse.REMAINDER:
            words.runs_another = True
        elif not action.option_strings:
            words.argument = words.argument or _values(action)
        elif action.help != argparse.SUPPRESS:
            words.flags += [CompletedFlag(name, action.help or "", _values(action)) for name in _spellings(action)]
    if path == "examples":
        yield from _words_of_examples(words)
        return
    yield words
    for name, command in below:
        yield from read_words(command, f"{path} {name}".strip())


def _words_of_examples(words: Words) -> Iterator[Words]:
    """The words of `accelerate examples`, whose second argument is the name of an example."""
    from accel_cli.examples.catalog import read_examples

    words.commands, words.argument = dict.fromkeys(words.argument, ""), ()
    yield words
    yield Words(f"{words.path} list")
    yield Words(f"{words.path} copy", argument=tuple(read_examples()))


def _spellings(action: argparse.Action) -> list[str]:
    """List the spellings of a flag without those that have hyphens for underscores."""
    given = action.option_strings
    twins = {name for name in given if f"--{name[2:].replace('-', '_')}" in given and "-" in name[2:]}
    return [name for name in given if name not in twins]


def _values(action: argparse.Action) -> tuple[str, ...]:
    """The values of a flag or a positional argument."""
    if action.nargs == 0:
        return ()
    if action.choices is not None:
        return tuple(str(choice) for choice in action.choices)
    option = find(action.dest)
    if option is not None and option.kind.closed:
        return option.kind.choices
    if action.metavar == "BOOL":
        return TRUTH
    return (KINDS.get(str(action.metavar or action.dest), ANYTHING),)
