"""Launches that a cluster starts later, on machines of its own: what `accelerate slurm` and `accelerate kubernetes` share."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence

from typing_extensions import override

from accel_cli.arguments import Flag
from accel_cli.errors import UsageError
from accel_cli.launch.machine import Machine
from accel_cli.launch.resolve import from_namespace, resolve
from accel_cli.launch.settings import LaunchSettings
from accel_cli.launch.validate import OWN_RENDEZVOUS, check_flags
from accel_state.clusters import DEFAULT_PORT

BY_THE_JOB = "set-by-the-job"  # a placeholder
NAMED = ("flag", "file")

# set by the job itself, or not for it
NOT_PASSED_ON = (
    "config_file", "num_machines", "num_processes", "machine_rank", "main_process_ip", "main_process_port", "dry_run",
    "training_script", "training_script_args", "aws_access_key_id", "aws_secret_access_key",
)  # fmt: skip


class ComputeNode(Machine):
    """A machine of the job. It cannot be queried now, but has what the job requests.

    Args:
        gpus: How many it has.
    """

    is_here = False

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus

    @override
    def num_devices(self) -> int:
        """Count the GPUs that the job requests."""
        return self.gpus

    @override
    def has_devices(self, gpu_ids: str = "") -> bool:
        """Assume that the machines of the job have accelerators if settings ask for them."""
        return True

    @override
    def fault_of_gpu_ids(self, gpu_ids: str) -> str:
        """Assume that the machines of the job have the GPUs that settings name; the launch on the machine checks it."""
        return ""

    @override
    def visible_devices_variable(self) -> str:
        """The variable of CUDA; the launch on the machine uses the right one."""
        return "CUDA_VISIBLE_DEVICES"

    @override
    def num_cores(self) -> int:
        """One core: the number of threads is chosen on the machine."""
        return 1

    @override
    def port(self, wanted: int | None, default: int = DEFAULT_PORT) -> int:
        """The default: whether it is free is checked on the machine."""
        return wanted or default


def launch_arguments(args: Namespace, options: Collection[Flag]) -> Namespace:
    """Copy a command line without the options of the command alone, and check the flags of the launch.

    Args:
        args: The parsed command line.
        options: Those of the command.

    Raises:
        UsageError: Flags contradict one another.
    """
    names = {option.name for option in options}
    launch = Namespace(**{name: value for name, value in vars(args).items() if name not in names})
    check_flags(from_namespace(launch))
    return launch


def resolve_later(
    launch: Namespace,
    environ: Mapping[str, str] | None,
    gpus: int,
    command: str,
    overrides: Mapping[str, int] | None = None,
) -> LaunchSettings:
    """Resolve the settings as the launch on the first machine of the job will, without its address.

    Args:
        launch: The arguments of the launch; it is changed.
        environ: The environment variables; those of this process when None.
        gpus: How many each machine has.
        command: The name of the command, for messages.
        overrides: Further options of the launch, and their values.

    Raises:
        UsageError: The settings ask for a launcher that starts the processes of all machines itself.
    """
    values = {"machine_rank": 0, "main_process_ip": BY_THE_JOB, **(overrides or {})}
    launch.nondefault = {*getattr(launch, "nondefault", ()), *values}
    vars(launch).update(values)
    settings = resolve(launch, environ, ComputeNode(gpus))
    if settings.runner in OWN_RENDEZVOUS:
        raise UsageError(
            f"`accelerate {command}` cannot be combined with the launcher {settings.runner!r} of these settings: each machine of the "
            "job runs `accelerate launch` itself. Leave the launcher out."
        )
    return settings.with_changes(port_was_named=False)  # whether it is free on this machine does not matter


def flag_words(option: Flag, value: object) -> Iterator[str]:
    """The words that give an option of the launch a value; none for a switch that is off, or an option without one."""
    flag = option.flags.split()[-1]
    if option.is_switch:
        yield from [flag] if value == (option.action == "store_true") else []
    elif value is not None:
        items: Sequence[object] = value if isinstance(value, list) else [value]
        yield from (f"{flag}={item}" for item in items)
