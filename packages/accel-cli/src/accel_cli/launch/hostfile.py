"""Whether the machines of a hostfile are enough for a launch."""

from __future__ import annotations

from accel_cli.errors import UsageError
from accel_cli.launch.settings import LaunchSettings


def check_hosts(settings: LaunchSettings) -> None:
    """Check that the hostfile has the machines, and each of them the slots, for the processes.

    Args:
        settings: The resolved settings.

    Raises:
        UsageError: It has too few.
    """
    if not settings.hosts:
        return
    name = "deepspeed_hostfile" if settings.use_deepspeed else "mpirun_hostfile"
    file = f"--{name} {getattr(settings, name)!r}"
    if len(settings.hosts) < settings.num_machines:
        raise UsageError(
            f"--num_machines {settings.num_machines} is more than the machines in {file}: {', '.join(settings.hosts)}."
        )
    if settings.deepspeed_inclusion_filter or settings.deepspeed_exclusion_filter:  # which name slots themselves
        return
    each = settings.num_processes // settings.num_machines
    for host, slots in list(settings.hosts.items())[: settings.num_machines]:
        if slots is not None and slots < each:
            raise UsageError(
                f"{settings.num_processes} processes on {settings.num_machines} machines are {each} on each, and {file} has "
                f"{slots} slots for {host!r}. Give a lower --num_processes, or change the hostfile."
            )
