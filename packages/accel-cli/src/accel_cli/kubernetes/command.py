"""The command `accelerate kubernetes`: a launch as a manifest. Nothing is contacted."""

from __future__ import annotations

import sys
from argparse import Namespace

from accel_cli.arguments import CommandParser, add_options
from accel_cli.kubernetes.flags import KUBERNETES
from accel_cli.kubernetes.manifest import documents
from accel_cli.kubernetes.workload import make_workload
from accel_cli.launch.flags.table import SHOWN_WITH, add_launch_options

HELP = "Print a launch as a manifest for Kubernetes."


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `accelerate kubernetes`."""
    parser.allow_abbrev = False
    parser.shown_with |= SHOWN_WITH
    parser.usage = (
        "accelerate kubernetes --image IMAGE [options] [options of accelerate launch] script [arguments of the script]"
    )
    add_options(parser.add_argument_group("Kubernetes"), KUBERNETES)
    add_launch_options(parser)


def run(args: Namespace) -> int:
    """Print the manifest.

    Args:
        args: The parsed arguments.

    Returns:
        The exit status for the shell.

    Raises:
        ValueError: The command line, the config file or the environment is not valid.
    """
    import yaml

    workload = make_workload(args)
    for note in () if args.quiet else workload.notes:
        print(f"accelerate kubernetes: {note}", file=sys.stderr)
    print(yaml.safe_dump_all(documents(workload, args.kind), sort_keys=False), end="")
    return 0
