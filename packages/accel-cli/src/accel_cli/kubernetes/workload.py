"""The pods of a launch, from a parsed command line and the settings."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from accel_cli.errors import UsageError
from accel_cli.kubernetes.flags import KUBERNETES, check_kubernetes_flags
from accel_cli.launch.flags.table import all_options, value_of
from accel_cli.launch.later import NAMED, NOT_PASSED_ON, flag_words, launch_arguments, resolve_later
from accel_cli.launch.settings import ROWS, LaunchSettings
from accel_cli.launch.validate import check_settings
from accel_state.clusters import DEFAULT_PORT


@dataclass(frozen=True, slots=True)
class Workload:
    """What the manifest describes.

    Attributes:
        name: Name of the job.
        namespace: Its namespace; empty for that of whoever applies it.
        runtime: Training runtime of a TrainJob.
        image: Image of the containers.
        command: Command of each container.
        nodes: Number of pods.
        processes_per_node: Processes of each.
        port: Port of the rendezvous, on pod 0.
        resources: What each pod requests, in Kubernetes' names.
        shared_memory: Size of /dev/shm; empty for Kubernetes' default.
        volumes: Claim and path of each volume.
        variables: Environment variables of the pods.
        restarts: How often each pod may be replaced after a failure.
        notes: Lines to print for the user.
    """

    name: str
    namespace: str
    runtime: str
    image: str
    command: tuple[str, ...]
    nodes: int
    processes_per_node: int
    port: int
    resources: Mapping[str, str]
    shared_memory: str
    volumes: tuple[tuple[str, str], ...]
    variables: Mapping[str, str]
    restarts: int
    notes: tuple[str, ...]


def make_workload(args: Namespace, environ: Mapping[str, str] | None = None) -> Workload:
    """Check a command line, resolve it with the config file and the environment, and describe the pods.

    Args:
        args: The parsed arguments of `accelerate kubernetes`.
        environ: The environment variables; those of this process when None.

    Raises:
        ValueError: The command line, the config file or the environment is not valid.
        FileNotFoundError: The config file does not exist.
    """
    check_kubernetes_flags(args)
    settings = _settle(args, environ, args.gpus_per_node or 0)
    count, gpus = settings.num_processes // settings.num_machines, args.gpus_per_node or 0
    if not settings.use_cpu and (not count or settings.sources["num_processes"] == "guess" and not gpus):
        raise UsageError("The number of GPUs of each pod is missing. Give --gpus_per_node, or --cpu for none.")
    gpus = 0 if settings.use_cpu else gpus or count
    amounts = {"cpu": args.cpus, "memory": args.memory, args.gpu_resource: str(gpus) if gpus else None}
    pairs = [text.partition("=") for text in args.pod_env or ()]
    return Workload(
        name=args.name or _name_of(args.training_script),
        namespace=args.namespace or "",
        runtime=args.runtime,
        image=args.image,
        command=("accelerate", "launch", *_words(settings), settings.training_script, *settings.training_script_args),
        nodes=settings.num_machines,
        processes_per_node=count,
        port=settings.main_process_port or DEFAULT_PORT,
        resources={name: amount for name, amount in amounts.items() if amount},
        shared_memory=args.shared_memory or "",
        volumes=tuple((claim, path) for claim, _, path in (text.partition(":") for text in args.volume or ())),
        variables={name: value for name, _, value in pairs},
        restarts=args.pod_restarts,
        notes=settings.notes,
    )


def _settle(args: Namespace, environ: Mapping[str, str] | None, gpus: int) -> LaunchSettings:
    """Resolve the settings as the launch in pod 0 will."""
    settings = resolve_later(launch_arguments(args, KUBERNETES), environ, gpus, "kubernetes")
    if gpus and settings.num_processes != gpus * settings.num_machines:
        raise UsageError(
            f"num_processes is {settings.num_processes}, and --gpus_per_node {gpus} on {settings.num_machines} machines makes "
            f"{gpus * settings.num_machines}, one process for each GPU. Leave one of them out."
        )
    settings = settings.with_changes(
        main_process_port=settings.main_process_port or DEFAULT_PORT, port_was_named=False
    )
    return settings.with_notes(*check_settings(settings, script=False))  # the script is in the image


def _name_of(script: str) -> str:
    """Make a job name from the name of a script, of valid characters."""
    stem = os.path.splitext(os.path.basename(script))[0].lower()
    name = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:50].rstrip("-")
    return name if name[:1].isalpha() else f"train-{name}"[:50].rstrip("-")


def _words(settings: LaunchSettings) -> Iterator[str]:
    """Yield the flags of `accelerate launch` for what flags and config file have set: the image has no such file."""
    yield from ["--cpu"] if settings.use_cpu else []
    for name, option in all_options().items():
        if settings.sources.get(name) not in NAMED or name in (*NOT_PASSED_ON, "cpu") or not option.flags:
            continue
        value = getattr(settings, name) if name in ROWS else value_of(settings, name)
        if value != option.initial:
            yield from flag_words(option, value)
