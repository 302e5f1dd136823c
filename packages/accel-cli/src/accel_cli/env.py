"""The command `accelerate env`: facts for a bug report."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from accel_cli.arguments import CommandParser, Flag, add_options, command_parser
from accel_cli.errors import without_traceback

HELP = "Print versions, devices and settings, for a bug report."
PACKAGES = {  # looked up, never imported; with the labels that templates of bug reports look for
    "numpy": "Numpy version",
    "safetensors": "safetensors version",
    "transformers": "transformers version",
    "deepspeed": "deepspeed version",
}

LOCATION = "`accelerate` bash location"  # a key that programs read

SETTINGS_FILE = Flag("--config_file", "Config file to show instead of the default one.", metavar="FILE")


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `accelerate env`."""
    add_options(parser, [SETTINGS_FILE])


def env_command_parser(subparsers: Any = None) -> CommandParser:
    """Build the parser of `accelerate env`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` returned, or None for a separate parser.
    """
    return command_parser(subparsers, "env", HELP, add_arguments, env_command)


def env_command(args: Namespace, find: Callable[[str], str | None] | None = None) -> dict[str, Any]:
    """Print and return facts about this installation.

    Args:
        args: With `config_file`, the config file to show, or None for the default one.
        find: Finds a program by its name; `shutil.which` when None.

    Raises:
        FileNotFoundError: The config file of `--config_file` does not exist.
    """
    settings = _settings(args.config_file)
    facts: dict[str, Any] = {**describe(find)}
    print("\nCopy and paste the text below into your report\n")
    for name, value in facts.items():
        print(f"- {name}: {value}")
    title = "`Accelerate` default config" if args.config_file is None else "`Accelerate` config passed"
    facts[title] = settings
    print(f"- {title}:")
    print("\n".join(f"\t- {key}: {value}" for key, value in settings.items()) or "\tNot found")
    return facts


def run(args: Namespace) -> None:
    """Run `accelerate env`."""
    env_command(args)


def describe(find: Callable[[str], str | None] | None = None) -> dict[str, str]:
    """Return versions and devices as text. Errors become text, too; nothing is raised.

    Args:
        find: Finds a program by its name; `shutil.which` when None.
    """
    asked = FACTS | {LOCATION: lambda: _location(find)}
    facts = {name: text for name, ask in asked.items() if (text := _safely(ask))}
    for package, label in PACKAGES.items():
        if (version := _version(package)) != "not installed":
            facts[label] = version
    return facts


def _settings(path: str | None) -> dict[str, Any]:
    """Read the config file. An error in the default file is shown; for `--config_file`, it is raised."""
    from accel_cli.configfile.location import default_config_path
    from accel_cli.configfile.read import load_config_from_file

    if path is not None:
        with without_traceback():
            return load_config_from_file(path).to_dict()
    if not os.path.isfile(default_config_path(os.environ)):
        return {}
    try:
        return load_config_from_file(None).to_dict()
    except ValueError as error:
        return {"error": str(error)}


def _safely(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except Exception as error:  # this command is needed most where an installation is broken
        return f"unknown ({type(error).__name__}: {error})"


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _platform() -> str:
    import platform

    return platform.platform()


def _python() -> str:
    import platform

    return f"{platform.python_version()} ({platform.python_implementation()})"


def _location(find: Callable[[str], str | None] | None = None) -> str:
    import shutil

    return (find or shutil.which)("accelerate") or "Not found"


def _memory() -> str:
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{pages / 1024**3:.2f} GB"


def _torch() -> str:
    import torch

    return str(torch.__version__)


def _accelerators() -> str:
    from accel_state.devices import detect_device_kind
    from accel_state.nvidia import explain_missing_gpus

    kind = detect_device_kind()
    if kind.name == "cpu":
        missing = explain_missing_gpus()
        return "none" if missing is None else f"none: this machine has {missing.gpus}, but {missing.reason}"
    return f"{kind.device_count()} x {kind.name} {_gpu_type()}".rstrip()


def _gpu_type() -> str:
    """The name of this machine's accelerator; empty where there is none, or it has no name."""
    from accel_state.devices import detect_device_kind

    module = detect_device_kind().module()
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else ""


def _device_libraries() -> str:
    """The libraries of other vendors' devices that are installed, and whether they have found one."""
    from accel_state.devices import DEVICE_KINDS
    from accel_state.libraries import is_installed

    libraries = []
    for kind in DEVICE_KINDS:
        if kind.library is not None and is_installed(package := kind.library.partition(".")[0]):
            count = kind.device_count()
            libraries.append(f"{package} ({f'{count} x {kind.name}' if count else 'no device'})")
    return ", ".join(libraries) or "none"


FACTS: dict[str, Callable[[], str]] = {
    "`Accelerate` version": lambda: _version("accelerate"),
    "Platform": _platform,
    LOCATION: _location,
    "Python version": _python,
    "PyTorch version": _torch,
    "PyTorch accelerator": _accelerators,
    "GPU type": _gpu_type,
    "Device libraries": _device_libraries,
    "CPU cores": lambda: str(os.cpu_count()),
    "System RAM": _memory,
}
