"""Launches on several machines by DeepSpeed's own launcher, from its hostfile."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from accel_cli.errors import UsageError
from accel_cli.launch.network import gloo_interface
from accel_cli.launch.plan import Plan, environment
from accel_cli.launch.settings import LaunchSettings
from accel_state.clusters import DEFAULT_PORT
from accel_state.environment import convert_dict_to_env_variables
from accel_state.interfaces import own_address

OWN_FILES = ("~/.deepspeed_env", ".deepspeed_env")  # the user's environment variables for every machine
WRITTEN_FILE = ".accelerate_deepspeed_env"  # those of this launch
FILE_VARIABLE = "DS_ENV_FILE"  # the file that DeepSpeed reads


@dataclass(frozen=True, slots=True)
class Launcher:
    """One of DeepSpeed's launchers for several machines.

    Attributes:
        name: Its name for `--deepspeed_multinode_launcher`.
        program: The program that DeepSpeed needs for it; empty for none.
        selects: Whether it can start fewer processes than the hostfile has slots.
        by_mpi: Whether an MPI program starts the processes, which are then not told the address of rank 0.
    """

    name: str
    program: str
    selects: bool = True
    by_mpi: bool = False


LAUNCHERS = {
    row.name: row
    for row in (
        Launcher("pdsh", "pdsh"),
        Launcher("openmpi", "ompi_info", selects=False, by_mpi=True),
        Launcher("mpich", "mpirun", selects=False, by_mpi=True),
        Launcher("mvapich", "mpiname", selects=False, by_mpi=True),
        Launcher("slurm", "sinfo"),
        Launcher("nossh", ""),
    )
}

# variables that belong to this machine or this login, and would be wrong on another machine
NOT_FORWARDED = (
    "_", "DBUS_", "DISPLAY", "HOME", "HOSTNAME", "LOGNAME", "LS_COLORS", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL",
    "SSH_", "TERM", "TMPDIR", "TMUX", "USER", "XAUTHORITY", "XDG_",
)  # fmt: skip
# DeepSpeed writes variables into command lines that every user can see
SECRET_WORDS = ("KEY", "PASSWORD", "SECRET", "TOKEN", "CREDENTIAL")


def plan(settings: LaunchSettings, environ: Mapping[str, str]) -> Plan:
    """Plan a launch with DeepSpeed's launcher.

    Args:
        settings: The resolved settings.
        environ: The variables that are set already; the other machines get them, except for secrets and those that
            belong to this machine or login.

    Raises:
        ValueError: The launcher cannot start this number of processes.
    """
    launcher = LAUNCHERS[settings.deepspeed_multinode_launcher.lower()]
    check_selection(settings, launcher)
    variables = environment(settings, environ)
    if launcher.by_mpi:
        address = settings.main_process_ip or next(iter(settings.hosts), "127.0.0.1")
        variables |= {"MASTER_ADDR": address, "MASTER_PORT": str(settings.main_process_port or DEFAULT_PORT)}
    if launcher.name == "nossh" and settings.main_process_ip:  # runs on each machine, so that it has its address
        variables |= gloo_interface(own_address(settings.main_process_ip) or "127.", environ)
    text = environment_lines(forwarded(environ) | own_lines() | variables)
    return Plan(
        "deepspeed",
        tuple(command(settings, launcher)),
        variables | {FILE_VARIABLE: os.path.abspath(WRITTEN_FILE)},
        quiet=bool(settings.quiet),
        files=((WRITTEN_FILE, text),),
    )


def check_selection(settings: LaunchSettings, launcher: Launcher) -> None:
    """Check that a launcher which always uses the complete hostfile is not asked to use some of it."""
    if launcher.selects:
        return
    for name in ("deepspeed_inclusion_filter", "deepspeed_exclusion_filter"):
        if getattr(settings, name):
            raise UsageError(
                f"--{name} and --deepspeed_multinode_launcher {launcher.name} exclude one another: this launcher always "
                "uses the complete hostfile. Write another hostfile, or use --deepspeed_multinode_launcher pdsh."
            )
    room = sum(slots or 0 for slots in settings.hosts.values())
    if settings.hosts and room != settings.num_processes:
        raise UsageError(
            f"--deepspeed_multinode_launcher {launcher.name} starts a process in each of the {room} slots of "
            f"--deepspeed_hostfile {settings.deepspeed_hostfile!r}, but --num_processes is {settings.num_processes}. "
            f"Give --num_processes {room}, or change the hostfile."
        )


def command(settings: LaunchSettings, launcher: Launcher) -> list[str]:
    """Return the command for all machines; `nossh` starts those of this machine, and runs on each of them."""
    words = ["deepspeed"]
    if settings.deepspeed_hostfile:
        words += ["--hostfile", settings.deepspeed_hostfile]
    words += ["--no_local_rank"]  # otherwise the script gets an argument that it does not know
    if launcher.name == "nossh":
        words += ["--node_rank", str(settings.machine_rank), "--no_ssh"]
    else:
        words += ["--launcher", launcher.name]
    if settings.deepspeed_exclusion_filter:
        words += ["--exclude", settings.deepspeed_exclusion_filter]
    elif settings.deepspeed_inclusion_filter:
        words += ["--include", settings.deepspeed_inclusion_filter]
    elif launcher.selects:
        words += ["--num_gpus", str(settings.num_processes // settings.num_machines)]
    if settings.main_process_ip:
        words += ["--master_addr", settings.main_process_ip]
    words += ["--master_port", str(settings.main_process_port or DEFAULT_PORT)]
    kind = ["--module"] if settings.module else ["--no_python"] if settings.no_python else []
    return [*words, *kind, settings.training_script, *settings.training_script_args]


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Choose the environment variables of this machine that the other machines get."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if value and not name.startswith(NOT_FORWARDED) and not any(word in name.upper() for word in SECRET_WORDS)
    }


def environment_lines(variables: Mapping[str, str]) -> str:
    """Return the text of an environment file, without variables that a shell could misread."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # most are variables of the user's shell, which no script reads
        return "".join(convert_dict_to_env_variables(variables))


def own_lines() -> dict[str, str]:
    """Read the user's files of environment variables that DeepSpeed sets on every machine.

    Raises:
        ValueError: One cannot be read.
    """
    variables: dict[str, str] = {}
    for path in map(os.path.expanduser, OWN_FILES):
        if not os.path.exists(path):
            continue
        try:
            with open(path, encoding="utf-8") as file:
                pairs = [line.strip().partition("=") for line in file if "=" in line]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path!r} cannot be read: {error}.") from error
        variables |= {name.strip(): value for name, _, value in pairs}
    return variables
