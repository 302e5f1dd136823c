"""Options as rows of a table, and the parser that is built from them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from accel_cli.errors import did_you_mean
from accel_cli.extensions import brings
from accel_state.public_names import known_as
from accel_state.settings.option import BOOLEAN, TEXT, Kind


@dataclass(frozen=True, slots=True)
class Flag:
    """One command-line option: flags, help, type, default and environment variable.

    Attributes:
        flags: Its spellings, the long one last (`"-q --quiet"`), separated by blanks; a name without hyphens is a
            positional argument. Empty for an option that only a config file can set.
        help: What it does, for `--help` and as the question of `accelerate config`.
        default: The value when it is not given.
        kind: The type of its values.
        as_text: Whether the value stays a `str`.
        action: As in argparse.
        nargs: As in argparse.
        dest: Name in the parsed result; by default that of the long flag.
        metavar: Placeholder in `--help`; that of the kind when None.
        environment: The environment variable that passes the value to the script, if there is one. Several names
            separated by blanks take the items of a sequence.
        spelled: Converts the value for the variable, if not as the kind does; the variable is not set if it is empty.
        required: Whether the option must be given.
    """

    flags: str
    help: str
    default: Any = None
    kind: Kind = TEXT
    as_text: bool = False
    action: str = "store"
    nargs: str | None = None
    dest: str = ""
    metavar: str | None = None
    environment: str = ""
    spelled: Callable[[Any], str] | None = None
    required: bool = False

    @property
    def name(self) -> str:
        """The attribute of the parsed result that holds the value."""
        return self.dest or self.flags.split()[-1].lstrip("-").replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """True when the flag takes no value."""
        return self.action in ("store_true", "store_false")

    @property
    def type(self) -> Callable[[str], Any]:
        """The function that converts a `str` to the value, for argparse."""
        return str if self.as_text or self.kind.exact else self.kind.parse

    @property
    def choices(self) -> tuple[str, ...] | None:
        """The only values that the flag accepts, case-sensitive; None if it accepts others, too."""
        return self.kind.choices if self.kind.exact else None

    @property
    def initial(self) -> Any:
        """The default as argparse sets it: a `str` is parsed like a given one."""
        return self.type(self.default) if not self.is_switch and isinstance(self.default, str) else self.default

    def spell(self, value: Any) -> str:
        """Convert a value for the environment variable; empty if the variable is not to be set."""
        return self.spelled(value) if self.spelled is not None else self.kind.spell(value)

    def add_to(self, container: Any) -> None:
        """Add the option to an argparse parser or group."""
        if not self.flags:
            return
        words: dict[str, Any] = {"help": self.help, "action": self.action, "default": self.default}
        if not self.is_switch:
            metavar = self.metavar or self.kind.metavar
            wanted = {"type": self.type, "choices": self.choices, "nargs": self.nargs, "metavar": metavar}
            words |= {key: value for key, value in wanted.items() if value is not None}
        if self.flags.startswith("-"):
            words |= {"dest": self.name, "required": self.required}
        action = container.add_argument(*self.flags.split(), **words)
        action.brought_by = self.kind.brought_by
        if self.nargs == "...":
            action.required = False  # there may be no arguments left


def switch(flags: str, help: str, *, default: Any = False, **rest: Any) -> Flag:
    """Row of a flag without a value, which sets True."""
    return Flag(flags, help, default=default, kind=BOOLEAN, action="store_true", **rest)


def only_if_on(word: str) -> Callable[[Any], str]:
    """Set the environment variable of a switch to `word` when it is on, and not at all when it is off."""
    return lambda value: word if value else ""


def add_options(container: Any, options: Iterable[Flag]) -> None:
    """Add all rows to an argparse parser or group."""
    for option in options:
        option.add_to(container)


def spellings(flags: Iterable[str]) -> list[str]:
    """Every way a flag may be written: `--num_processes` is `--num-processes` too."""
    both = [(flag, "--" + flag[2:].replace("_", "-") if flag.startswith("--") else flag) for flag in flags]
    return list(dict.fromkeys(spelling for pair in both for spelling in pair))


class CommandHelp(argparse.HelpFormatter):
    """Help that shows one spelling of each flag."""

    def __init__(self, prog: str, **settings: Any) -> None:
        # argparse would import shutil for the width, and would do so for every option that is added
        super().__init__(prog, max_help_position=32, width=_terminal_width(), **settings)

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):  # whose heading says it already
            return "".join(map(super()._format_action, action._get_subactions()))
        return super()._format_action(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        spelled = action.option_strings
        twins = {spelling for flag in spelled if "_" in flag for spelling in spellings([flag]) if spelling != flag}
        if not twins:
            return super()._format_action_invocation(action)
        action.option_strings = [flag for flag in spelled if flag not in twins]
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = spelled


@known_as("accelerate.commands.utils.CustomArgumentGroup")
class CommandArgumentGroup(argparse._ArgumentGroup):
    """A group of options in which every flag may be written with underscores or hyphens."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an option under both spellings of its flags."""
        return super().add_argument(*spellings(args), **kwargs)


class _Noted:
    """Mixin for argparse's actions that adds the names of given options to `nondefault`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        super().__call__(parser, namespace, values, option_string)  # type: ignore[misc]
        namespace.nondefault = {*getattr(namespace, "nondefault", ()), self.dest}  # type: ignore[attr-defined]


HELP_ALL = "--help_all"
"""Shows the groups that `--help` hides, too."""

NOTED_ACTIONS = {
    word: type(f"Noted{action.__name__}", (_Noted, action), {})
    for word, action in {
        "store": argparse._StoreAction,
        "store_true": argparse._StoreTrueAction,
        "store_false": argparse._StoreFalseAction,
        "append": argparse._AppendAction,
    }.items()
}


@known_as("accelerate.commands.utils.CustomArgumentParser")
class CommandParser(argparse.ArgumentParser):
    """A parser in which every flag may be written with underscores or hyphens.

    The result has an attribute `nondefault`: the set of names that the command line gave.

    Args:
        *args: As for `argparse.ArgumentParser`.
        shown_with: Group title -> the flag that makes `--help` show the group. Other groups are always shown.
        **kwargs: As for `argparse.ArgumentParser`.

    Attributes:
        late_options: Adds the options that take time to import; called once, when a flag is not known without them.
    """

    def __init__(self, *args: Any, shown_with: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", CommandHelp)
        super().__init__(*args, **kwargs)
        self.shown_with = dict(shown_with or {})
        self.late_options: Callable[[], None] | None = None
        self._words: list[str] = []
        for word, action in NOTED_ACTIONS.items():
            self.register("action", word, action)
        self.register("action", None, NOTED_ACTIONS["store"])

    def _print_message(self, message: str, file: Any = None) -> None:
        from accel_cli.color import paint

        super()._print_message(paint(message, file), file)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an option under both spellings of its flags."""
        return super().add_argument(*spellings(args), **kwargs)

    def add_argument_group(self, *args: Any, **kwargs: Any) -> argparse._ArgumentGroup:
        """Add a group whose options have both spellings, too."""
        group = CommandArgumentGroup(self, *args, **kwargs)
        self._action_groups.append(group)
        return group

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and keep the arguments so that `--help` can show the groups that belong to them."""
        self._words = list(sys.argv[1:] if args is None else args)
        if self.late_options is not None and (self._names_unknown_flag() or self._asks_for_help()):
            self.add_late_options()
        return super().parse_known_args(args, namespace)

    def add_late_options(self) -> None:
        """Add the options of `late_options`, unless they were added already."""
        add, self.late_options = self.late_options, None
        if add is not None:
            add()

    def _names_unknown_flag(self) -> bool:
        """Whether one of the flags before the first positional argument is not known yet."""
        words = iter(self._words)
        for word in words:
            name, equals, _ = word.partition("=")
            if not word.startswith("-") or word in ("-", "--"):
                return False  # what follows is for the script
            action = self._option_string_actions.get(name)
            if action is None:
                return True
            if action.nargs != 0 and not equals:
                next(words, None)
        return False

    def _asks_for_help(self) -> bool:
        """Whether the help will be shown, which names every flag."""
        given = {word.partition("=")[0].replace("-", "_").strip("_") for word in self._words}
        return bool(given & {"help", "h", HELP_ALL.strip("-")})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, with an error for unknown flags that suggests similar ones."""
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            meant = [f"did you mean {flag} for {word}?" for word in unknown if (flag := self._closest_flag(word))]
            self.error("; ".join([f"unrecognized arguments: {' '.join(unknown)}", *meant]))
        return namespace

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check the choices, with an error that suggests a similar one."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if brings(getattr(action, "brought_by", ""), str(value)):
                return
            error.message += did_you_mean(str(value), [str(choice) for choice in action.choices or ()])
            raise

    def _closest_flag(self, word: str) -> str | None:
        from difflib import get_close_matches

        name = word.partition("=")[0].replace("-", "_").strip("_")
        known = {flag.strip("-"): flag for flag in self._option_string_actions if "-" not in flag.strip("-")}
        ends = [end for end in known if end.endswith(f"_{name}")]
        candidates = (ends or get_close_matches(name, known, n=1, cutoff=0.8)) if word.startswith("--") else []
        return known[candidates[0]] if candidates else None

    def format_help(self) -> str:
        """Build the help text without the groups whose flag is not given."""
        given = {word.partition("=")[0].replace("-", "_").strip("_") for word in self._words}
        shows_all = HELP_ALL.strip("-") in given
        hidden = (
            {}
            if shows_all
            else {title: flag for title, flag in self.shown_with.items() if flag.strip("-") not in given}
        )
        every_group = self._action_groups
        self._action_groups = [group for group in every_group if group.title not in hidden]
        try:
            text = super().format_help()
        finally:
            self._action_groups = every_group
        if not hidden:
            return text
        titles = {title: f"  --help {flag}".ljust(34) + f"{title}\n" for title, flag in hidden.items()}
        rows = "".join(titles[group.title] + _names_of(group) for group in every_group if group.title in titles)
        return f"{text}\nmore options:\n{rows}"


def _names_of(group: argparse._ArgumentGroup) -> str:
    """The names of the options of a group, indented lines of them."""
    from textwrap import fill

    shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
    names = " ".join([flag for flag in action.option_strings if "-" not in flag[2:]][-1] for action in shown)
    indent = " " * 6
    return (
        fill(names, _terminal_width(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False) + "\n"
    )


def make_parser(subparsers: Any, command: str, help: str, **settings: Any) -> CommandParser:
    """Build the parser of one command, without its options.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` returned, to make it a command of a program; None for a
            separate parser.
        command: Name of the command.
        help: One line on what the command does.
        **settings: Passed on to the parser.
    """
    settings.setdefault("description", help)
    if subparsers is None:
        return CommandParser(prog=f"accelerate {command}", **settings)
    parser: CommandParser = subparsers.add_parser(command, help=help, **settings)
    return parser


def command_parser(
    subparsers: Any, command: str, help: str, add_arguments: Callable[[CommandParser], None], function: Any
) -> CommandParser:
    """Build the parser of one command for a program, as the functions `..._command_parser` of accelerate 1.15 do.

    Args:
        subparsers: As for `make_parser`.
        command: As for `make_parser`.
        help: As for `make_parser`.
        add_arguments: Adds the options.
        function: The attribute `func` of the parsed result, where the command is one of several.
    """
    parser = make_parser(subparsers, command, help)
    add_arguments(parser)
    parser.add_late_options()
    if subparsers is not None:
        parser.set_defaults(func=function)
    return parser


def _terminal_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        return int(columns) - 2
    try:
        return min(os.get_terminal_size().columns, 120) - 2
    except OSError:
        return 98
