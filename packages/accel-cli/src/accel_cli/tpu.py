"""The command `accelerate tpu-config`: run commands on every machine of a TPU pod, through gcloud."""

from __future__ import annotations

import os
import shlex
from argparse import Namespace
from typing import Any

from accel_cli.arguments import CommandParser, Flag, add_options, command_parser, switch
from accel_cli.configfile.location import default_config_path
from accel_cli.errors import MissingFileError, UsageError, without_traceback

HELP = "Run commands on every machine of a TPU pod."
FOLDER = "/usr/share"  # where the commands are run
DISTRIBUTION = "accel-cli"  # whose metadata names the repository

OPTIONS = (
    Flag("--config_file", "Config file to use instead of the default one.", metavar="FILE"),
    Flag("--tpu_name", "Name of the TPU; that of the config file if left out.", metavar="NAME"),
    Flag("--tpu_zone", "Zone of the TPU; that of the config file if left out.", metavar="ZONE"),
    switch("--use_alpha", "Use the alpha version of gcloud."),
    Flag("--command_file", "File with the commands to run, one per line.", metavar="FILE"),
    Flag("--command", "A command to run; may be given several times.", action="append", nargs="+"),
    switch("--install_accelerate", "Install accelerate first."),
    Flag("--accelerate_version", "Version to install: latest, dev or a number.", default="latest",
           metavar="VERSION"),
    switch("--debug", "Print the command instead of running it."),
)  # fmt: skip


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `accelerate tpu-config`."""
    add_options(parser, OPTIONS)


def tpu_command_parser(subparsers: Any = None) -> CommandParser:
    """Build the parser of `accelerate tpu-config`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` gave, or None for a parser of its own.
    """
    return command_parser(subparsers, "tpu-config", HELP, add_arguments, tpu_command_launcher)


def tpu_command_launcher(args: Namespace) -> None:
    """Run commands on a TPU pod, or print the gcloud command.

    Args:
        args: The parsed arguments of `tpu_command_parser`.

    Raises:
        ValueError: The name, the zone, the commands or gcloud are missing.
        subprocess.CalledProcessError: gcloud failed.
    """
    command = gcloud_command(args)
    if args.debug:
        # programs look for the first line; the second one is for a shell
        print(f"Running {' '.join(command)}")
        print(shlex.join(command))
        return
    import shutil
    import subprocess

    if shutil.which(command[0]) is None:
        raise UsageError(
            "The program 'gcloud' is not installed. Install the Google Cloud CLI, or print the command with --debug."
        )
    subprocess.run(command, check=True)
    print("The commands have run on every machine of the pod.")


def run(args: Namespace) -> int:
    """Run `accelerate tpu-config`.

    Returns:
        The exit status for the shell: that of gcloud.
    """
    import subprocess

    try:
        tpu_command_launcher(args)
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    return 0


def gcloud_command(args: Namespace) -> list[str]:
    """Return the gcloud command.

    Args:
        args: The parsed arguments. Missing ones are read from the config file.

    Raises:
        ValueError: The name, the zone or the commands are missing.
    """
    settings = _settings(args.config_file)
    name = args.tpu_name or settings.get("tpu_name")
    zone = args.tpu_zone or settings.get("tpu_zone")
    commands = _commands(args, settings)
    for flag, value in {"--tpu_name": name, "--tpu_zone": zone}.items():
        if not value:
            raise UsageError(f"{flag} is missing. Give it, or set it in the config file.")
    if not commands:
        raise UsageError("There are no commands to run. Give --command or --command_file.")
    if args.install_accelerate:
        commands.insert(0, f"pip install {_distribution(args.accelerate_version)}")
    alpha = ["alpha"] if args.use_alpha else []
    script = "; ".join([f"cd {FOLDER}", *commands])
    where = [str(name), "--zone", str(zone), "--command", script, "--worker", "all"]
    return ["gcloud", *alpha, "compute", "tpus", "tpu-vm", "ssh", *where]


def _settings(path: str | None) -> dict[str, Any]:
    """Read the config file of `--config_file`, or the default one if it exists."""
    if path is None and not os.path.isfile(default_config_path(os.environ)):
        return {}
    from accel_cli.configfile.read import load_config_from_file

    with without_traceback():
        return dict(vars(load_config_from_file(path)))


def _commands(args: Namespace, settings: dict[str, Any]) -> list[str]:
    """List the commands: those of the command line, or else those of the config file."""
    if args.command:
        return [word for words in args.command for word in ([words] if isinstance(words, str) else words)]
    path = args.command_file or (None if settings.get("commands") else settings.get("command_file"))
    if not path:
        return list(settings.get("commands") or ())
    try:
        with open(path, encoding="utf-8") as file:
            return [line.strip() for line in file if line.strip()]
    except FileNotFoundError:
        raise MissingFileError(f"The command file {path!r} does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The command file {path!r} cannot be read: {error}.") from None


def _distribution(version: str) -> str:
    """The argument of `pip install`."""
    if version == "latest":
        return "accelerate -U"
    return shlex.join(_newest_commit()) if version == "dev" else shlex.quote(f"accelerate=={version}")


def _newest_commit() -> list[str]:
    """Each of our packages, as the repository has it."""
    from importlib.metadata import distributions

    repositories = {
        distribution.name: url.partition(",")[2].strip()
        for distribution in distributions()
        for url in distribution.metadata.get_all("Project-URL") or ()
        if url.startswith("Repository,")
    }
    ours = repositories.get(DISTRIBUTION)
    if ours is None:
        raise UsageError(
            f"--accelerate_version dev: this build of {DISTRIBUTION} does not name its repository. Give a version, or latest."
        )
    names = sorted(name for name, repository in repositories.items() if repository == ours)
    return [f"{name} @ git+{ours}#subdirectory=packages/{name}" for name in names]
