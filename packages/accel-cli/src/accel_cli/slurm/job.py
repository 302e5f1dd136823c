"""The resources and commands of a SLURM job, from a parsed command line and the settings."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from accel_cli.errors import UsageError
from accel_cli.launch.flags.table import find
from accel_cli.launch.later import NAMED, NOT_PASSED_ON, flag_words, launch_arguments, resolve_later
from accel_cli.launch.settings import LaunchSettings
from accel_cli.launch.validate import check_settings
from accel_cli.slurm.flags import SLURM, check_slurm_flags, num_gpus, resume_words

CPUS_PER_GPU = 4  # the default: the process itself, and data loader workers
ANY_PORT = 1  # placeholder for a port that the job chooses


@dataclass(frozen=True, slots=True)
class Job:
    """The content of the batch script.

    Attributes:
        name: Name of the job.
        nodes: Number of machines.
        num_processes: On all machines together.
        gpus_per_node: In the form of sbatch; empty without GPUs.
        cpus_per_task: CPU cores on each machine.
        options: Further options of sbatch, such as `("--time=1:00:00",)`.
        folder: Where the job runs.
        requeue: Whether it is requeued; None for the default of the cluster.
        grace_seconds: How long before its time limit it is ended, if it is requeued.
        setup: Shell commands to run first.
        port: Port of the rendezvous; None for one that depends on the job id.
        launch_words: Flags of `accelerate launch`.
        script_words: The script and its arguments.
        resume_words: Further arguments when the job was requeued.
        notes: Lines to print for the user.
    """

    name: str
    nodes: int
    num_processes: int
    gpus_per_node: str
    cpus_per_task: int
    options: tuple[str, ...]
    folder: str
    requeue: bool | None
    grace_seconds: int
    setup: tuple[str, ...]
    port: int | None
    launch_words: tuple[str, ...]
    script_words: tuple[str, ...]
    resume_words: tuple[str, ...]
    notes: tuple[str, ...]


def make_job(args: Namespace, environ: Mapping[str, str] | None = None) -> Job:
    """Check a command line, resolve it with the config file and the environment, and make the job.

    Args:
        args: The parsed arguments of `accelerate slurm`.
        environ: The environment variables; those of this process when None.

    Raises:
        ValueError: The command line, the config file or the environment is not valid.
        FileNotFoundError: The script or the config file does not exist.
    """
    check_slurm_flags(args)
    gpus = num_gpus(args.gpus_per_node)
    settings = _settle(args, environ, gpus)
    nodes = settings.num_machines
    per_node = gpus or _processes_per_node(settings)
    if settings.use_cpu and gpus:
        raise UsageError(_cpu_instead_of_gpus(args.gpus_per_node, settings))
    if args.num_processes:
        _check_count(args.num_processes, nodes, gpus)
    return Job(
        name=args.job_name or _name_of(args.training_script),
        nodes=nodes,
        num_processes=per_node * nodes,
        gpus_per_node=args.gpus_per_node or ("" if settings.use_cpu else str(per_node)),
        cpus_per_task=args.cpus_per_task or _cores(settings, per_node),
        options=tuple(_options(args)),
        folder=os.getcwd(),
        requeue=True if args.requeue else False if args.no_requeue else None,
        grace_seconds=args.grace_seconds,
        setup=tuple(args.setup or ()),
        port=settings.main_process_port if settings.sources.get("main_process_port") in NAMED else None,
        launch_words=tuple(_launch_words(args, settings)),
        script_words=(args.training_script, *args.training_script_args),
        resume_words=tuple(resume_words(args)),
        notes=tuple(settings.notes),
    )


def _settle(args: Namespace, environ: Mapping[str, str] | None, gpus: int) -> LaunchSettings:
    """Resolve the settings as the launch on a machine of the job will."""
    overrides = {"num_machines": args.nodes} if args.nodes else {}
    if gpus and not args.num_processes:
        overrides["num_processes"] = gpus * (args.nodes or args.num_machines or 1)
    settings = resolve_later(launch_arguments(args, SLURM), environ, gpus, "slurm", overrides)
    sources = dict(settings.sources)
    if gpus and not args.num_processes:  # the config file may have had the number of machines
        settings, sources["num_processes"] = settings.with_changes(num_processes=gpus * settings.num_machines), "guess"
    if not settings.main_process_port:
        settings, sources["main_process_port"] = settings.with_changes(main_process_port=ANY_PORT), "guess"
    settings = settings.with_changes(sources=sources)
    return settings.with_notes(*check_settings(settings))


def _cpu_instead_of_gpus(gpus: str, settings: LaunchSettings) -> str:
    """The message for settings that choose the CPU although GPUs are requested."""
    path = settings.settings_file
    if path is None or settings.sources.get("cpu") != "file":
        return (
            f"--gpus_per_node {gpus} contradicts the environment variable ACCELERATE_USE_CPU. Unset it, or leave "
            "--gpus_per_node out."
        )
    from accel_cli.configfile.values import read_values

    values, source = read_values(path)
    key = "use_cpu" if values.get("use_cpu") else "distributed_type"
    return (
        f"--gpus_per_node {gpus} contradicts {key}: {values.get(key)} ({source.at(key)}), as `accelerate config` writes on "
        f"a machine without GPUs. Write use_cpu: false{' and another distributed_type' * (key != 'use_cpu')} there, or "
        "name another file with --config_file."
    )


def _processes_per_node(settings: LaunchSettings) -> int:
    known = settings.sources.get("num_processes") in NAMED
    if not known and not settings.use_cpu:
        raise UsageError("The number of GPUs per machine is missing. Give --gpus_per_node, or --cpu for none.")
    return int(settings.num_processes // settings.num_machines)


def _check_count(given: int, nodes: int, gpus: int) -> None:
    if gpus and given != gpus * nodes:
        raise UsageError(
            f"--num_processes {given} and --gpus_per_node {gpus} contradict one another: {nodes} machines have "
            f"{gpus * nodes} GPUs, one for each process. Leave --num_processes out."
        )


def _cores(settings: LaunchSettings, per_node: int) -> int:
    known = settings.sources.get("num_cpu_threads_per_process") in NAMED
    per_process = settings.num_cpu_threads_per_process if known else None
    return (per_process or (1 if settings.use_cpu else CPUS_PER_GPU)) * per_node


def _name_of(script: str) -> str:
    """Make a job name from the name of a script, of valid characters."""
    stem = os.path.splitext(os.path.basename(script))[0]
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-.") or "accelerate"


def _options(args: Namespace) -> Iterator[str]:
    for name in ("time", "partition", "account", "qos"):
        if value := getattr(args, name):
            yield f"--{name}={value}"
    yield from args.sbatch_option or ()


def _launch_words(args: Namespace, settings: LaunchSettings) -> Iterator[str]:
    """Yield the given flags of `accelerate launch`."""
    if settings.settings_file:
        yield from ("--config_file", os.path.abspath(os.path.expanduser(settings.settings_file)))
    for name in sorted(getattr(args, "nondefault", ())):
        option = find(name)
        if option is None or name in NOT_PASSED_ON:
            continue
        yield from flag_words(option, getattr(args, name))
