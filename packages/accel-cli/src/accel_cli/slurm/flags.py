"""Options of `accelerate slurm` in addition to those of `accelerate launch`, and checks of their values."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace

from accel_cli.arguments import Flag, switch
from accel_cli.errors import UsageError
from accel_state.settings.option import INTEGER

SLURM = (
    Flag("--nodes", "How many machines; num_machines of the settings if left out.", kind=INTEGER, metavar="N"),
    Flag("--gpus_per_node", "GPUs of each machine, one process each: a number, or type:number.", metavar="G"),
    Flag("--cpus_per_task", "CPU cores of each machine's task.", kind=INTEGER, metavar="N"),
    Flag("--time", "Time limit: minutes, hours:minutes:seconds, days-hours, ... or UNLIMITED.", metavar="LIMIT"),
    Flag("--partition", "Partition, or several separated by commas.", metavar="NAME"),
    Flag("--account", "Account to charge.", metavar="NAME"),
    Flag("--qos", "Quality of service.", metavar="NAME"),
    Flag("--job_name", "Name of the job; that of the script if left out.", metavar="NAME"),
    Flag("--sbatch_option", "Another option of sbatch, such as --mem=0; may be given several times. Write it "
           "with an equals sign: --sbatch_option=--mem=0.", action="append", metavar="OPTION"),
    Flag("--setup", "A shell command to run on the first machine before the launch; may be given several times.",
           action="append", metavar="COMMAND"),
    switch("--requeue", "Requeue the job when it is preempted or reaches its time limit.", default=None),
    switch("--no_requeue", "Never requeue the job.", default=None),
    Flag("--grace_seconds", "How long before its time limit the job is ended and requeued.", default=120,
           kind=INTEGER, metavar="S"),
    Flag("--resume_args", "Further arguments of the script when the job was requeued: "
           "--resume_args='--resume latest'.", default="", metavar="WORDS"),
    Flag("--output", "Write the batch script to this file instead of printing it.", metavar="FILE"),
    switch("--submit", "Submit the job with sbatch; with --dry_run, let sbatch only check it.", default=None),
)  # fmt: skip

TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}|UNLIMITED|INFINITE", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+:-]*")
NAMES = re.compile(rf"{NAME.pattern}(,{NAME.pattern})*")
GPUS = re.compile(r"(?:([A-Za-z0-9_][A-Za-z0-9_.-]*):)?(\d{1,4})", re.ASCII)
SBATCH_OPTION = re.compile(r"--?[A-Za-z][A-Za-z-]*([= ][^\n\r\0]+)?")

# option -> pattern of its values, and a description for messages
SHAPES: dict[str, tuple[re.Pattern[str], str]] = {
    "time": (TIME, "a time limit of SLURM: 90, 90:00, 12:00:00, 2-0, 2-12:00 or UNLIMITED"),
    "partition": (NAMES, "a partition, or several separated by commas"),
    "account": (NAME, "the name of an account"),
    "qos": (NAME, "the name of a quality of service"),
    "job_name": (NAME, "a name of letters, digits and _.@+:-"),
    "gpus_per_node": (GPUS, "a number of GPUs, or type:number"),
    "sbatch_option": (SBATCH_OPTION, "an option of sbatch on one line, such as --mem=0"),
    "setup": (re.compile(r"[^\0]+"), "a shell command"),
}
AT_LEAST_ONE = ("nodes", "cpus_per_task", "grace_seconds")


def check_slurm_flags(args: Namespace) -> None:
    """Check the options for values that would make a wrong batch script.

    Args:
        args: The parsed command line.

    Raises:
        ValueError: A value is not valid, or two contradict one another.
    """
    for name, (pattern, wanted) in SHAPES.items():
        given = getattr(args, name)
        for text in given if isinstance(given, list) else [given]:
            if text is not None and not pattern.fullmatch(text):
                raise UsageError(f"--{name} must be {wanted}, got {text!r}.")
    for name in AT_LEAST_ONE:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, got {value}.")
    for flag, other in (("requeue", "no_requeue"), ("cpu", "gpus_per_node")):
        if getattr(args, flag) and getattr(args, other):
            raise UsageError(f"--{flag} and --{other} contradict one another. Leave one of them out.")
    if args.nodes and args.num_machines and args.nodes != args.num_machines:
        raise UsageError(
            f"--nodes {args.nodes} and --num_machines {args.num_machines} contradict one another. Give only --nodes."
        )
    for name in ("machine_rank", "main_process_ip"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} is set by the job itself on the machines that SLURM allocates. Leave it out.")
    resume_words(args)


def num_gpus(text: str | None) -> int:
    """The number in `--gpus_per_node`; 0 if it was not given."""
    match = GPUS.fullmatch(text or "0")
    assert match is not None, "the value was checked"
    return int(match[2])


def resume_words(args: Namespace) -> list[str]:
    """Split `--resume_args` into arguments, as a shell does."""
    try:
        return shlex.split(args.resume_args)
    except ValueError as error:
        raise UsageError(
            f"--resume_args {args.resume_args!r} cannot be split as in a shell: {error}. Check its quotes."
        ) from None
