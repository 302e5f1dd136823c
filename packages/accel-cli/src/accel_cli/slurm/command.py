"""The command `accelerate slurm`: a launch as a SLURM job."""

from __future__ import annotations

import sys
from argparse import Namespace

from accel_cli.arguments import CommandParser, add_options
from accel_cli.errors import UsageError
from accel_cli.launch.flags.table import SHOWN_WITH, add_launch_options
from accel_cli.slurm.flags import SLURM
from accel_cli.slurm.job import make_job
from accel_cli.slurm.script import batch_script

HELP = "Write or submit a SLURM job for a launch."


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `accelerate slurm`."""
    parser.allow_abbrev = False
    parser.shown_with |= SHOWN_WITH
    parser.usage = "accelerate slurm [options] [options of accelerate launch] script [arguments of the script]"
    add_options(parser.add_argument_group("SLURM"), SLURM)
    add_launch_options(parser)


def run(args: Namespace) -> int:
    """Print a batch script, write it, or submit it.

    Args:
        args: The parsed arguments.

    Returns:
        The exit status for the shell: that of sbatch if it was called.

    Raises:
        ValueError: The command line, the config file or the environment is not valid.
    """
    job = make_job(args)
    for note in () if args.quiet else job.notes:
        print(f"accelerate slurm: {note}", file=sys.stderr)
    text = batch_script(job)
    if args.output:
        _write(args.output, text)
    if args.submit:
        return _submit(text, test_only=bool(args.dry_run))
    if not args.output:
        print(text, end="")
    return 0


def _write(path: str, text: str) -> None:
    from accel_cli.launch.files import write_private

    write_private(path, text)
    print(f"Batch script written to {path}", file=sys.stderr)


def _submit(text: str, *, test_only: bool) -> int:
    import subprocess

    try:
        return subprocess.run(["sbatch", *(["--test-only"] if test_only else [])], input=text, text=True).returncode
    except FileNotFoundError:
        raise UsageError(
            "--submit needs the program 'sbatch', which is not installed. Run this on a machine of the cluster, or leave "
            "--submit out."
        ) from None
