"""What environment variables say about a launch: the same variables that hand the settings on to the script."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

from accel_cli.arguments import Option
from accel_cli.errors import UsageError
from accel_cli.launch.flags.group import OptionGroup
from accel_cli.launch.flags.table import GROUPS, OPTIONS
from accel_cli.launch.from_file import HARDWARE_FLAGS
from accel_cli.launch.values import coerce, set_value

WAYS = ("use_deepspeed", "use_fsdp", "use_megatron_lm")  # one excludes the others

OF_OTHERS = (
    "CCL_WORKER_COUNT",
    "OMP_NUM_THREADS",
)  # may hold more than we understand, and reach the script as they are

# variable -> what to tell who still sets it
RETIRED_VARIABLES = {
    "ACCELERATE_USE_IPEX": "Intel's extension for PyTorch is retired, and torch has what it did",
    "ACCELERATE_USE_XPU": "Intel GPUs are found without it",
}


def take_environment(settings: Namespace, environ: Mapping[str, str]) -> None:
    """Give every option that nobody else has set the value of its variable.

    Args:
        settings: What is being resolved.
        environ: The environment variables; empty ones do not count.

    Raises:
        ValueError: For a value that is not allowed.
    """
    _take_cpu(settings, environ)
    for group in GROUPS:
        if group.announced_by:
            _take_announcement(settings, group, environ)
        if group.handed_when(settings):
            for option in group.options:
                if option.name not in settings.sources:
                    _take_option(settings, option, environ)
    for name, why in RETIRED_VARIABLES.items():
        if environ.get(name):
            settings.notes.append(f"the variable {name} has no effect any more: {why}.")


def _take_cpu(settings: Namespace, environ: Mapping[str, str]) -> None:
    wanted = environ.get("ACCELERATE_USE_CPU")
    if wanted and settings.settings_file is None and not any(getattr(settings, flag) for flag in HARDWARE_FLAGS):
        settings.use_cpu = coerce(OPTIONS["cpu"], wanted, "environment variable ACCELERATE_USE_CPU")
        settings.sources["cpu"] = "environment"


def _take_announcement(settings: Namespace, group: OptionGroup, environ: Mapping[str, str]) -> None:
    """Switch a way of training on, where neither command line nor settings file has chosen another."""
    flag = group.shown_with.lstrip("-")
    word = environ.get(group.announced_by)
    other = [way for way in WAYS if way != flag and getattr(settings, way)] if flag in WAYS else []
    if not word or other or getattr(settings, flag):
        return
    if coerce(OPTIONS[flag], word, f"environment variable {group.announced_by}"):
        set_value(settings, flag, True, "environment")


def _take_option(settings: Namespace, option: Option, environ: Mapping[str, str]) -> None:
    variables = option.environment.split()
    found = [name for name in variables if environ.get(name)]
    if not found:
        return
    text = environ[found[0]]
    if len(variables) > 1:  # one item of a sequence each; those not set keep their default
        text = ",".join(environ.get(name) or str(item) for name, item in zip(variables, option.default, strict=True))
    try:
        value = coerce(option, text, f"environment variable {' '.join(found)}")
    except UsageError:
        if option.environment in OF_OTHERS:
            return
        raise
    set_value(settings, option.name, value, "environment")
