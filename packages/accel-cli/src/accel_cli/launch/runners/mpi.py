"""CPU processes that mpirun starts, on the machines of a hostfile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accel_cli.errors import MissingFileError, UsageError
from accel_cli.launch.plan import Plan, environment, script_command, single_environment
from accel_cli.launch.settings import LaunchSettings
from accel_state.clusters import DEFAULT_PORT

# beginnings of variables that a script may need on the other machines
FORWARDED = ("ACCELERATE_", "CCL_", "FI_", "FSDP_", "GLOO_", "HF_", "I_MPI_", "KMP_", "MKL_", "OMP_", "PARALLELISM_CONFIG_",
             "PYTHON", "TORCH_", "TRANSFORMERS_", "LD_LIBRARY_PATH", "PATH", "VIRTUAL_ENV")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mpi:
    """The flags of one implementation of MPI.

    Attributes:
        name: Its name.
        signs: Words in the output of `mpirun --version` by which it is recognized.
        hostfile: The flag for the list of machines.
        per_machine: The flag for the number of processes on each machine.
        always: Arguments that every launch needs.
        send: The flag that sends one variable to the other machines; empty if all of them are sent anyway.
        as_root: Arguments that it needs to be run by root.
    """

    name: str
    signs: tuple[str, ...]
    hostfile: str
    per_machine: str
    always: tuple[str, ...] = ()
    send: str = ""
    as_root: tuple[str, ...] = ()


# MVAPICH and Intel MPI start processes with MPICH's program, so MPICH comes last
KINDS = (
    # by default, Open MPI binds a process to one core, so that it could not use threads
    Mpi("Open MPI", ("open mpi", "openrte", "prrte"), "--hostfile", "-N", ("--bind-to", "socket"), "-x",
        ("--allow-run-as-root",)),
    Mpi("Intel MPI", ("intel",), "-f", "-ppn", ("-genvall",)),
    Mpi("MVAPICH", ("mvapich",), "-f", "-ppn", ("-genvall",)),
    Mpi("MPICH", ("hydra", "mpich"), "-f", "-ppn", ("-genvall",)),
)  # fmt: skip


def kind_of(version: str) -> Mpi:
    """Recognize an implementation of MPI.

    Args:
        version: The output of `mpirun --version`; empty when there is no such program.

    Raises:
        ValueError: There is none (a FileNotFoundError, too), or an unknown one.
    """
    if not version:
        raise MissingFileError(
            "--mpirun_hostfile needs the program 'mpirun', which is not installed. Install Open MPI, Intel MPI, MPICH or "
            "MVAPICH, or leave --mpirun_hostfile out."
        )
    for kind in KINDS:
        if any(sign in version.lower() for sign in kind.signs):
            return kind
    known = ", ".join(kind.name for kind in KINDS)
    raise UsageError(
        f"`mpirun --version` printed {version.splitlines()[0]!r}, which is not a supported MPI. Use one of {known}."
    )


def plan(settings: LaunchSettings, environ: Mapping[str, str]) -> Plan:
    """Plan a launch with mpirun.

    Args:
        settings: The resolved settings.
        environ: The variables that are set already; those that a script may need are sent to the other machines.
    """
    kind = kind_of(settings.mpi_version)
    variables = environment(settings, environ) | single_environment(settings, environ) | _rendezvous_address(settings)
    per_machine = str(settings.num_processes // settings.num_machines)
    argv = ["mpirun", kind.hostfile, settings.mpirun_hostfile or "", kind.per_machine, per_machine]
    argv += ["-n", str(settings.num_processes), *kind.always]
    argv += kind.as_root if settings.is_root else ()
    if kind.send and settings.num_machines > 1:
        argv += [word for name in _sent(variables, environ) for word in (kind.send, name)]
    return Plan("mpi", (*argv, *script_command(settings)), variables, quiet=bool(settings.quiet))


def _rendezvous_address(settings: LaunchSettings) -> dict[str, str]:
    """The address of rank 0: by default the first machine of the hostfile."""
    alone = settings.num_machines == 1
    address = settings.main_process_ip or ("127.0.0.1" if alone else next(iter(settings.hosts)))
    return {"MASTER_ADDR": address, "MASTER_PORT": str(settings.main_process_port or DEFAULT_PORT)}


def _sent(variables: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """The names of variables to send to the other machines; without values, so that the command has no secrets."""
    return sorted({*variables, *(name for name in environ if name.startswith(FORWARDED))})
