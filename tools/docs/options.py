"""Reference pages of the command line, the config file and environment variables, made from the option rows."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from inspect import isclass
from pkgutil import iter_modules

import accel_state.settings
from accel_cli.arguments import Flag
from accel_cli.configfile.schema import BaseConfig, ClusterConfig, SageMakerConfig
from accel_cli.launch.flags.group import OptionGroup
from accel_cli.launch.flags.table import GROUPS
from accel_cli.main import COMMANDS
from accel_state.settings.option import options_of
from tools.docs.names import PACKAGES, ROOT
from tools.docs.variables import VARIABLES

VARIABLE = re.compile(r"""["']((?:ACCELERATE|FSDP|MEGATRON_LM|PARALLELISM_CONFIG)_[A-Z0-9_]+)["']""")
NO_VARIABLES = {  # names that look like ours: constants of accelerate 1.15, and flags that are gone
    "FSDP_PYTORCH_VERSION", "FSDP_SHARDING_STRATEGY_", "ACCELERATE_USE_XPU", "ACCELERATE_USE_IPEX",
}  # fmt: skip
CONFIG_HELP = {"compute_environment": "Where processes run.", "distributed_type": "The kind of hardware and engine."}


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable.

    Attributes:
        name: Its name.
        help: What it does.
        values: What it takes.
        default: The value when it is not set.
        flag: The flag that sets it for the processes; empty when there is none.
    """

    name: str
    help: str
    values: str
    default: str
    flag: str = ""


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the Markdown of each page."""
    yield "reference/commands.md", "\n".join(_overview())
    for name, command in COMMANDS.items():
        text = _launch() if name == "launch" else _command(name, command.make_parser())
        yield f"reference/commands/{name}.md", "\n".join(text)
    yield "reference/config-file.md", "\n".join(_config_file())
    yield "reference/environment.md", "\n".join(_environment())


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _anchor(name: str) -> str:
    return f'<a id="{name}"></a>'


def _overview() -> Iterator[str]:
    yield "# Commands\n"
    yield "Every flag may be written with underscores or hyphens. `accelerate COMMAND --help` prints the same.\n"
    yield "| command | |"
    yield "|---|---|"
    for name, command in COMMANDS.items():
        yield f"| [`accelerate {name}`](commands/{name}.md) | {_cell(command.help)} |"


def _command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"# accelerate {name}\n"
    yield from _parser(name, parser)


def _parser(path: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"{_cell(parser.description or '')}\n"
    if path == "slurm":
        yield "It takes every flag of [`accelerate launch`](launch.md) as well.\n"
    actions = [action for action in parser._actions if _is_shown(action) and not _is_of_launch(path, action)]
    for action in actions:
        yield _entry(_spelled(action), _values(action), action.default, action.help)
    yield ""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield f"## accelerate {path} {name}\n"
                yield from _parser(f"{path} {name}", below)


def _is_shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and not isinstance(action, argparse._SubParsersAction)


def _is_of_launch(path: str, action: argparse.Action) -> bool:
    return path == "slurm" and action.dest in {row.name for group in GROUPS for row in group.options if row.flags}


def _spelled(action: argparse.Action) -> list[str]:
    given = action.option_strings or [str(action.metavar or action.dest)]
    return [name for name in given if not ("-" in name[2:] and f"--{name[2:].replace('-', '_')}" in given)]


def _values(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    return ", ".join(map(str, action.choices)) if action.choices else str(action.metavar or "")


def _entry(flags: Iterable[str], values: str, default: object, help: str | None, *more: str) -> str:
    """An item of a definition list: the flag with its anchor, and everything that is known of it."""
    spelled = list(flags)
    anchor = _anchor(spelled[-1].lstrip("-").replace("-", "_"))
    shown = "" if default in (None, False, argparse.SUPPRESS, "") else f"Default: `{default}`."
    said = " ".join(part for part in (_cell(help or ""), shown) if part)
    lines = [f"{anchor}{', '.join(map(_code, spelled))} {_cell(values)}".rstrip(), f":   {said}"]
    return "\n".join([*lines, *(f"    {line}" for line in more if line), ""])


def _launch() -> Iterator[str]:
    yield "# accelerate launch\n"
    yield "Run a script on one process or many. [Starting programs](../../launch.md) says how; this is every flag.\n"
    yield "    accelerate launch [flags] script.py [arguments of the script]\n"
    for title, groups in _by_title():
        yield f"## {title}\n"
        shown_with = next((group.shown_with for group in groups if group.shown_with), "")
        if shown_with:
            yield f"`--help` lists them when `{shown_with}` is given.\n"
        for group in groups:
            for row in group.options:
                yield _launch_entry(group, row)
        yield ""


def _by_title() -> Iterator[tuple[str, list[OptionGroup]]]:
    titles: dict[str, list[OptionGroup]] = {}
    for group in GROUPS:
        titles.setdefault(group.title or "General", []).append(group)
    yield from titles.items()


def _launch_entry(group: OptionGroup, row: Flag) -> str:
    key = _key(group, row)
    variables = ", ".join(f"[`{name}`](../environment.md#{name})" for name in row.environment.split())
    below = [f"Environment variable: {variables}." if variables else ""]
    below.append(f"Key of the config file: [`{key}`](../config-file.md#{key})." if key else "")
    flags = row.flags.split() or [row.name]
    return _entry(flags, _kind(row), _default(row), _help(row), " ".join(filter(None, below)))


def _key(group: OptionGroup, row: Flag) -> str:
    if group.section:
        return f"{group.section}.{row.name}"
    names = {field.name for kind in (ClusterConfig, SageMakerConfig) for field in fields(kind)}
    return row.name if row.name in names else ""


def _kind(row: Flag) -> str:
    if row.is_switch:
        return ""
    if row.kind.closed or row.kind.exact:
        return ", ".join(row.kind.choices)
    expected = row.kind.expected
    return f"{expected}, such as {', '.join(row.kind.choices)}" if row.kind.choices else expected


def _default(row: Flag) -> object:
    return row.kind.spell(row.default) if row.default is not None and not row.is_switch else row.default


def _help(row: Flag) -> str:
    return "No effect any more." if row.help in (None, argparse.SUPPRESS) else row.help


def config_keys() -> dict[str, str]:
    """Every key of a config file, with its section before a dot, and what it does."""
    found = {
        field.name: CONFIG_HELP.get(field.name, "")
        for kind in (BaseConfig, ClusterConfig, SageMakerConfig)
        for field in fields(kind)
        if field.name not in ClusterConfig.section_names
    }
    for group in GROUPS:
        for row in group.options:
            name = f"{group.section}.{row.name}" if group.section else row.name
            if group.section or name in found:
                found[name] = _help(row)
    return found


def _config_file() -> Iterator[str]:
    yield "# Config file\n"
    yield "[Settings](../config.md) says how config files are written and read; these are all keys.\n"
    sections: dict[str, list[tuple[str, str]]] = {}
    for key, help in config_keys().items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append((name, help))
    for section, rows in sections.items():
        yield f"## {section or 'At the top'}\n"
        if prefix := next((group.prefix for group in GROUPS if section and group.section == section), ""):
            yield f"`{prefix}` may be left out.\n"
        yield "| key | |"
        yield "|---|---|"
        for name, help in rows:
            where = f"{section}.{name}" if section else name
            yield f"| {_anchor(where)}`{name}` | {_cell(help)} |"
        yield ""


def variables() -> dict[str, Variable]:
    """Every environment variable that our packages read or set, by name."""
    found = {name: Variable(name, help, values, default) for name, (help, values, default) in VARIABLES.items()}
    for row in _settings_rows():
        found[row.name] = row
    for group in GROUPS:
        if group.enabled_by:
            flag = group.shown_with or ""
            found[group.enabled_by] = Variable(group.enabled_by, f"Set by `{flag}`.", "true or false", "", flag)
        for row in group.options:
            for name in row.environment.split():
                flag = row.flags.split()[-1] if row.flags else ""
                shown = "" if _default(row) in (None, False) else str(_default(row))
                known = found.get(name)
                help = _help(row) or (known.help if known else "")
                found[name] = Variable(name, help, _kind(row) or "true or false", shown, flag)
    return dict(sorted(found.items()))


def _settings_rows() -> Iterator[Variable]:
    names = [f"accel_state.settings.{module.name}" for module in iter_modules(accel_state.settings.__path__)]
    for module in map(import_module, [*names, "accel_state.mesh"]):
        for kind in vars(module).values():
            if not (isclass(kind) and is_dataclass(kind)):
                continue
            for field, row in options_of(kind).items():
                for name in row.variables:
                    help = row.help or f"`{kind.__name__}.{field}` when it is not given in code."
                    default = "" if row.fallback is None else str(row.fallback)
                    yield Variable(name, help, row.kind.expected, default)


def _environment() -> Iterator[str]:
    yield "# Environment variables\n"
    yield "A flag wins over the config file, which wins over the variable. `accelerate launch` sets these variables"
    yield "for the processes; with another launcher, set them yourself. A value in code wins over all of them.\n"
    for row in variables().values():
        flag = row.flag.lstrip("-")
        link = (
            f"Flag: [`{row.flag}`](commands/launch.md#{flag})." if flag and not row.help.startswith("Set by") else ""
        )
        default = f"Default: `{row.default}`." if row.default else ""
        yield f"{_anchor(row.name)}`{row.name}` {_cell(row.values)}"
        yield f":   {' '.join(part for part in (_cell(row.help), default, link) if part)}\n"


def variables_in_code() -> set[str]:
    """Every variable with one of our prefixes that stands in the packages' code."""
    found: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / "packages" / package / "src").rglob("*.py"):
            for row in VARIABLE.findall(path.read_text()):
                found.add(row)
    return {name for name in found if name not in NO_VARIABLES and not name.endswith("_")}


def missing(built: dict[str, set[str]]) -> list[str]:
    """Flags, keys and variables without an entry in the built site; one line for each.

    Args:
        built: Page (relative to docs/) -> the anchors that its HTML has.
    """
    wanted = [("reference/environment.md", name) for name in variables_in_code() | set(variables())]
    wanted += [("reference/config-file.md", name) for name in config_keys()]
    for name, command in COMMANDS.items():
        page = f"reference/commands/{name}.md"
        wanted += [(page, dest) for dest in _dests(name, command.make_parser())]
    rows = {
        row.flags.split()[-1].lstrip("-").replace("-", "_") for group in GROUPS for row in group.options if row.flags
    }
    wanted += [("reference/commands/launch.md", name) for name in rows]
    return [f"{page} has no entry for {name}" for page, name in sorted(wanted) if name not in built.get(page, set())]


def _dests(path: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    if path == "launch":
        return
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from _dests(f"{path} {name}", below)
        elif _is_shown(action) and not _is_of_launch(path, action):
            yield _spelled(action)[-1].lstrip("-").replace("-", "_")
