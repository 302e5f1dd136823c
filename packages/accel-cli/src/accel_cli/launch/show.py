"""The output of `accelerate launch --dry_run`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from accel_cli.arguments import Flag
from accel_cli.launch.flags.group import OptionGroup, always
from accel_cli.launch.flags.table import GROUPS, find, groups_of
from accel_cli.launch.machine import network_variables
from accel_cli.launch.plan import Plan
from accel_cli.launch.settings import LaunchSettings

SECRETS = ("aws_access_key_id", "aws_secret_access_key")
HIDDEN = "***"
# not settings of the run
NOT_SHOWN = ("config_file", "dry_run", "training_script", "training_script_args", "quiet", "module", "no_python")


def show(settings: LaunchSettings, plan: Plan) -> str:
    """Describe a launch.

    Args:
        settings: The resolved settings.
        plan: Their plan.

    Returns:
        A table of the settings with the source of each, and an equivalent shell command.
    """
    rows = [("setting", "value", "from"), *_rows(settings)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{name:{widths[0]}}  {value:{widths[1]}}  {source}" for name, value, source in rows]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(
        [*lines, "", "The same by hand:", "", shell_command(_complete(plan, settings), secret_variables(settings))]
    )


def _rows(settings: LaunchSettings) -> Iterator[tuple[str, str, str]]:
    shown: set[str] = set()
    for group in groups_of(settings):
        if not group.is_loaded and not group.passed_when(settings):
            continue  # none of its options was given
        for option in group.options:
            value = settings.use_cpu if option.name == "cpu" else group.value(option, settings)
            source = settings.sources.get(option.name)
            if option.name in (*NOT_SHOWN, *shown) or value is None:
                continue
            if source or (_matters(group, settings) and value is not False and value not in ("", [])):
                shown.add(option.name)
                yield option.name, _text(option.name, value), _origin(option, source, settings)


def _matters(group: OptionGroup, settings: LaunchSettings) -> bool:
    """Whether the defaults of a group affect this launch."""
    if group.passed_when is not always:
        return group.passed_when(settings)
    flag = group.shown_with.lstrip("-")
    return not flag or bool(getattr(settings, flag))


def _origin(option: Flag, source: str | None, settings: LaunchSettings) -> str:
    """The source of a value, for the table."""
    words = {
        "flag": "flag",
        "file": f"config file {settings.settings_file}",
        "environment": f"environment variable {_variable(option)}",
        "cluster": settings.cluster,
        "guess": "guess",
    }
    return words.get(source or "", "default")


def _variable(option: Flag) -> str:
    announced = {group.shown_with.lstrip("-"): group.enabled_by for group in GROUPS if group.enabled_by}
    return option.environment or announced.get(option.name) or "ACCELERATE_USE_CPU"


def _text(name: str, value: Any) -> str:
    return HIDDEN if name in SECRETS else str(value)


def secret_variables(settings: LaunchSettings) -> set[str]:
    """The environment variables whose values must not be shown."""
    return {name.upper() for name in SECRETS if getattr(settings, name, None)}


def shell_command(plan: Plan, secrets: Iterable[str] = ()) -> str:
    """Write a plan as a command for a POSIX shell.

    Args:
        plan: The plan.
        secrets: Variables to read from the shell's own environment.
    """
    words = ["env", *(f"{name}={_value(name, text, secrets)}" for name, text in sorted(plan.environment.items()))]
    command = " \\\n    ".join([*words, shlex.join(plan.argv)]) if plan.environment else shlex.join(plan.argv)
    return "\n".join([*(_file_command(path, text) for path, text in plan.files), command])


def _value(name: str, text: str, secrets: Iterable[str]) -> str:
    return f'"${name}"' if name in secrets else shlex.quote(text)


def _file_command(path: str, text: str) -> str:
    return f"(umask 077; printf %s {shlex.quote(text)} > {shlex.quote(path)})"


def _complete(plan: Plan, settings: LaunchSettings) -> Plan:
    """Add the variables that are set already, and those that the runner would set for the GPUs of this machine."""
    variables: dict[str, str] = {}
    for name, source in settings.sources.items():
        option = find(name)
        if option is not None and source == "environment":
            variables |= {key: os.environ[key] for key in option.environment.split() if key in os.environ}
    if plan.runner == "torchrun" and "ACCELERATE_USE_CPU" not in plan.environment:
        variables |= network_variables()
    return replace(plan, environment={**variables, **plan.environment})
