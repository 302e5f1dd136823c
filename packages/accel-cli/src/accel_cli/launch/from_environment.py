"""Launch settings from environment variables: the same variables that pass the settings to the script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_cli.arguments import Option
from accel_cli.errors import UsageError
from accel_cli.launch.flags.group import OptionGroup
from accel_cli.launch.flags.table import groups_of
from accel_cli.launch.from_file import HARDWARE_FLAGS
from accel_cli.launch.settings import ROWS, LaunchSettings
from accel_cli.launch.values import coerce

ENGINES = ("use_deepspeed", "use_fsdp", "use_megatron_lm")  # one excludes the others

SHARED_VARIABLES = (
    "CCL_WORKER_COUNT",
    "OMP_NUM_THREADS",
)  # may have values that we cannot parse, and are passed to the script unchanged

# environment variable -> why it is retired
RETIRED_VARIABLES = {
    "ACCELERATE_USE_IPEX": "Intel Extension for PyTorch is retired, and torch has its features",
    "ACCELERATE_USE_XPU": "Intel GPUs are detected without it",
}


def take_environment(settings: LaunchSettings, environ: Mapping[str, str]) -> LaunchSettings:
    """Set every option that neither a flag nor the config file has set from its environment variable.

    Args:
        settings: The settings so far.
        environ: The environment variables; empty ones are ignored.

    Returns:
        The settings with the values of the variables.

    Raises:
        ValueError: For a value that is not allowed.
    """
    settings = _take_cpu(settings, environ)
    for group in groups_of(settings):
        if group.enabled_by:
            settings = _take_engine(settings, group, environ)
        if group.passed_when(settings):
            pairs = (_read(option, environ) for option in group.options if option.name not in settings.sources)
            values = {name: value for pair in pairs if pair is not None for name, value in (pair,)}
            if values:
                settings = settings.with_values(values, "environment")
    retired = ((name, why) for name, why in RETIRED_VARIABLES.items() if environ.get(name))
    return settings.noting(
        *(f"the environment variable {name} has no effect any more, because {why}." for name, why in retired)
    )


def _take_cpu(settings: LaunchSettings, environ: Mapping[str, str]) -> LaunchSettings:
    wanted = environ.get("ACCELERATE_USE_CPU")
    chosen = settings.settings_file is not None or any(getattr(settings, flag) for flag in HARDWARE_FLAGS)
    if not wanted or chosen:
        return settings
    use_cpu = coerce(ROWS["cpu"], wanted, "environment variable ACCELERATE_USE_CPU")
    return settings.but(use_cpu=use_cpu, sources={**settings.sources, "cpu": "environment"})


def _take_engine(settings: LaunchSettings, group: OptionGroup, environ: Mapping[str, str]) -> LaunchSettings:
    """Enable an engine, unless the command line or the config file has chosen another."""
    flag = group.shown_with.lstrip("-")
    word = environ.get(group.enabled_by)
    other = [engine for engine in ENGINES if engine != flag and getattr(settings, engine)] if flag in ENGINES else []
    if not word or other or getattr(settings, flag):
        return settings
    wanted = coerce(ROWS[flag], word, f"environment variable {group.enabled_by}")
    return settings.with_values({flag: True}, "environment") if wanted else settings


def _read(option: Option, environ: Mapping[str, str]) -> tuple[str, Any] | None:
    """Read the variable of an option: the option's name and value, or None if the variable is not set."""
    variables = option.environment.split()
    names = [name for name in variables if environ.get(name)]
    if not names:
        return None
    text = environ[names[0]]
    if len(variables) > 1:  # one item of a sequence each; those not set keep their default
        text = ",".join(environ.get(name) or str(item) for name, item in zip(variables, option.default, strict=True))
    try:
        return option.name, coerce(option, text, f"environment variable {' '.join(names)}")
    except UsageError:
        if option.environment in SHARED_VARIABLES:
            return None
        raise
