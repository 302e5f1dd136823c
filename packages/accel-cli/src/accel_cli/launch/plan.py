"""The plan of a launch: which command runs, in which environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module

from accel_cli.launch.flags.table import groups_of
from accel_cli.launch.resolve import chosen_devices
from accel_cli.launch.settings import ROWS, LaunchSettings
from accel_state.clusters import DEFAULT_PORT, detect_cluster

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

# a value from one of these sources overrides a variable that is set; a default does not
CHOSEN = ("flag", "file", "cluster", "guess")

# options that torch's launcher has under the same name
PASSED_ON = ("tee", "log_dir", "role", "rdzv_conf", "max_restarts", "monitor_interval")
SHUTDOWN_SECONDS = 30.0  # as in torch's agent


@dataclass(frozen=True, slots=True)
class Plan:
    """The command and the environment of a launch.

    Attributes:
        runner: Who starts the processes: a key of `PLANNERS`.
        argv: The command; with `environment`, it does the same in a shell.
        environment: Variables to set, in addition to those that are set already.
        port_may_change: Whether another port may be used if this one is taken.
        quiet: Whether the crash report is suppressed.
        files: Path and content of files that the command reads: written before it, and removed after it.
        worker: The command of one process, where this program starts each process itself.
        num_workers: The number of these processes.
        hang_timeout: After how many seconds without progress the run is ended; None for never.
        shutdown_timeout: Seconds for which processes may go on after a signal.
    """

    runner: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    port_may_change: bool = False
    quiet: bool = False
    files: tuple[tuple[str, str], ...] = ()
    worker: tuple[str, ...] = ()
    num_workers: int = 0
    hang_timeout: float | None = None
    shutdown_timeout: float = SHUTDOWN_SECONDS


def make_plan(settings: LaunchSettings, environ: Mapping[str, str] | None = None) -> Plan:
    """Turn settings into a plan: a pure function, which starts and reads nothing.

    Args:
        settings: The resolved settings.
        environ: The variables that are set already; a default does not override them.
    """
    environ = os.environ if environ is None else environ
    return PLANNERS[settings.runner](settings, environ)


def _plan_single(settings: LaunchSettings, environ: Mapping[str, str]) -> Plan:
    return Plan(
        "simple",
        tuple(script_command(settings)),
        environment(settings, environ) | single_environment(settings, environ),
        quiet=bool(settings.quiet),
    )


def _plan_agent(settings: LaunchSettings, environ: Mapping[str, str]) -> Plan:
    return Plan(
        "torchrun",
        tuple(torchrun_command(settings)),
        environment(settings, environ) | agent_environment(settings, environ),
        port_may_change=settings.num_machines == 1 and not settings.port_was_named,
        quiet=bool(settings.quiet),
        hang_timeout=settings.hang_timeout,
    )


def _plan_local(settings: LaunchSettings, environ: Mapping[str, str]) -> Plan:
    """The processes that torch's agent would start, started directly."""
    python, *script = script_command(settings)
    address = {"MASTER_ADDR": settings.main_process_ip or "127.0.0.1", "MASTER_PORT": str(settings.main_process_port)}
    agent = _plan_agent(settings, environ)
    return replace(
        agent,
        runner="local",
        shutdown_timeout=SHUTDOWN_SECONDS if settings.shutdown_timeout is None else settings.shutdown_timeout,
        environment=agent.environment | address,
        worker=(python, *script) if settings.no_python else (python, "-u", *script),
        num_workers=settings.num_processes,
    )


def _elsewhere(module: str, name: str = "plan") -> Callable[[LaunchSettings, Mapping[str, str]], Plan]:
    """Import the planner when it is used: few launches need it."""
    return lambda settings, environ: getattr(import_module(f"accel_cli.launch.runners.{module}"), name)(
        settings, environ
    )


PLANNERS: dict[str, Callable[[LaunchSettings, Mapping[str, str]], Plan]] = {
    "simple": _plan_single,
    "local": _plan_local,
    "torchrun": _plan_agent,
    "mpi": _elsewhere("mpi"),
    "deepspeed": _elsewhere("deepspeed"),
    "tpu": _elsewhere("tpu"),
    "tpu_pod": _elsewhere("tpu", "plan_pod"),
    "sagemaker": _elsewhere("sagemaker"),
    "ray": _elsewhere("ray"),
}


def environment(settings: LaunchSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that pass the settings to the script."""
    variables = {}
    for group in groups_of(settings):
        for option, variable, text in group.variables(settings):
            if not option or settings.sources.get(option) in CHOSEN or variable not in environ:
                variables[variable] = text
        if group.enabled_by not in variables and is_on(environ.get(group.enabled_by)):
            variables[group.enabled_by] = "false"  # the command line or the config file has chosen another engine
    if settings.use_deepspeed:
        variables |= deepspeed_environment(settings, environ)
    if settings.use_cpu:
        variables["ACCELERATE_USE_CPU"] = "True"
    else:
        if is_on(environ.get("ACCELERATE_USE_CPU")):
            variables["ACCELERATE_USE_CPU"] = "False"
        if devices := chosen_devices(settings):
            variables[settings.visible_devices_variable] = ",".join(devices)
    return variables


def is_on(word: str | None) -> bool:
    """Whether the value of an environment variable means true."""
    return (word or "").lower() in ("1", "true", "t", "yes", "y", "on")


def deepspeed_environment(settings: LaunchSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return further variables for DeepSpeed's processes, which must import modules of this folder on any machine."""
    folders = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    variables = {"PYTHONPATH": os.pathsep.join([*folders, os.path.abspath(".")])}
    if settings.deepspeed_fields:
        variables["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(settings.deepspeed_fields)
    return variables


def single_environment(settings: LaunchSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return further variables for a single process that is not started by torch's agent."""
    variables = {"ACCELERATE_USE_CPU": str(settings.use_cpu)}
    if settings.use_cpu:
        variables |= {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
    place = detect_cluster(environ) if settings.started_by else None
    if place is not None:
        variables["MASTER_ADDR"] = settings.main_process_ip or place.master_addr or "127.0.0.1"
        variables["MASTER_PORT"] = str(settings.main_process_port or place.master_port or DEFAULT_PORT)
    return variables


def script_command(settings: LaunchSettings) -> list[str]:
    """Return the command that runs the script in one process."""
    python = [] if settings.no_python else [sys.executable or "python3"]
    module = ["-m"] if settings.module else []
    return [*python, *module, settings.training_script, *settings.training_script_args]


def rendezvous(settings: LaunchSettings) -> str:
    """Return the rendezvous backend. The static one does not support restarts."""
    again = settings.max_restarts > 0 and settings.num_machines == 1
    return "c10d" if again and settings.rdzv_backend == "static" else str(settings.rdzv_backend)


def agent_environment(settings: LaunchSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torch's agent itself: after a restart, a shared store would hold the old addresses."""
    own_store = settings.max_restarts > 0 and rendezvous(settings) != "static"
    return {OWN_STORE: "1"} if own_store and OWN_STORE not in environ else {}


def agent_arguments(settings: LaunchSettings) -> dict[str, object]:
    """Return the arguments of torch's elastic agent about processes and machines, by the names of its flags."""
    words: dict[str, object] = {
        "nnodes": settings.num_machines,
        "nproc_per_node": settings.num_processes // settings.num_machines,
    }
    if settings.num_machines > 1:
        words["node_rank"] = settings.machine_rank
    if rendezvous(settings) != ROWS["rdzv_backend"].default:
        words["rdzv_backend"] = rendezvous(settings)
    return words | _rendezvous_address(settings)


def torchrun_command(settings: LaunchSettings) -> list[str]:
    """Return the command that runs the script in several processes, under torch's elastic agent."""
    words = agent_arguments(settings)
    for name in PASSED_ON:
        value = getattr(settings, name)
        if value != ROWS[name].default:
            words[name] = value
    flags = [f"--{name}={value}" for name, value in words.items()]
    kind = ["--module"] if settings.module else ["--no_python"] if settings.no_python else []
    script = [settings.training_script, *settings.training_script_args]
    return [sys.executable or "python3", "-m", "torch.distributed.run", *flags, *kind, *script]


def _rendezvous_address(settings: LaunchSettings) -> dict[str, object]:
    """Return the arguments for the rendezvous: an address and a port, or a rendezvous endpoint."""
    address = settings.main_process_ip or "127.0.0.1"
    port = settings.main_process_port or DEFAULT_PORT
    alone = settings.num_machines == 1
    if alone and rendezvous(settings) == "c10d":  # else the agent tells its processes this machine's host name
        endpoint = f"{address}:{port}" if settings.port_was_named else "localhost:0"  # the agent takes a free port
        return {"rdzv_endpoint": endpoint, "local_addr": settings.main_process_ip or "localhost"}
    if rendezvous(settings) == "static" and (alone or settings.same_network):
        return {"master_addr": address, "master_port": port}
    return {"rdzv_endpoint": f"{address}:{port}"}
