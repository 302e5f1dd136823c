"""From what the user gave to complete settings: flag, then settings file, then environment, then a guess."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Mapping

from accel_cli.arguments import lower
from accel_cli.launch.flags.table import GROUPS, OPTIONS
from accel_cli.launch.from_environment import take_environment
from accel_cli.launch.from_file import take_file
from accel_cli.launch.machine import Machine
from accel_cli.launch.values import first_number, set_value

# who counts the processes of one machine, and of all, when mpirun started us
MPI_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")

DEEPSPEED_HOSTFILE = "/job/hostfile"  # where DeepSpeed looks when nobody names one
STANDARD = "standard"  # this command is run on each machine, and torch's agents meet
AGENT_OPTIONS = (
    "max_restarts",
    "tee",
    "log_dir",
    "role",
    "rdzv_backend",
    "rdzv_conf",
)  # what only torch's agent knows
MEETING_HERE = (
    "local",
    "torchrun",
    "mpi",
)  # runners whose processes meet at a port of this machine, if it is the only one

RUNS_HERE = ("simple", "local", "torchrun")  # runners whose processes compute on this machine

RETIRED_FLAGS = {
    "ipex": "Intel's extension for PyTorch is retired, and torch has what it did",
    "use_xpu": "Intel GPUs are found without it",
}


def resolve(args: Namespace, environ: Mapping[str, str] | None = None, machine: Machine | None = None) -> Namespace:
    """Complete what was parsed.

    Args:
        args: The parsed command line; it is not changed. A program may have changed it, or have made one by hand:
            options that it lacks have their default, and values other than the default count as given.
        environ: The environment variables; those of this process when None.
        machine: Who answers questions about the machine.

    Returns:
        The settings: every option, and besides `use_cpu`, `inside_mpi`, `visible_devices_variable`,
        `port_was_named`, `lacks_devices_for` (the flags that ask for accelerators where there are none), `hosts` (those of the hostfile, with how many processes each takes), `has_usual_hostfile`
        (that of DeepSpeed), `mpi_version` (what mpirun says), `is_root` and

        - `runner`: who starts the processes, a key of `accel_cli.launch.plan.PLANNERS`;
        - `sources`, option name -> `"flag"`, `"file"`, `"environment"` or `"guess"`; an option that is not in it has
          its default;
        - `settings_file`, the path of the file that was read, and `sagemaker`, its content if it is for Amazon;
        - `deepspeed_fields`, what the file says that a configuration of DeepSpeed's own would say, too;
        - `notes`, what the user should be told.

    Raises:
        ValueError: For values that are not allowed.
        FileNotFoundError: When the settings file that was named does not exist.
    """
    environ = os.environ if environ is None else environ
    return complete(read_settings(args, environ), environ, machine or Machine())


def read_settings(args: Namespace, environ: Mapping[str, str]) -> Namespace:
    """Take what was given, by flag, config file or environment variable; the first half of `resolve`.

    Raises:
        ValueError: For values that are not allowed.
        FileNotFoundError: When the config file that was named does not exist.
    """
    settings = Namespace(**{option.name: option.usual for option in OPTIONS.values()} | vars(args))
    settings.sources = dict.fromkeys(_given(args), "flag")
    settings.notes = []
    settings.use_cpu = settings.cpu
    settings.settings_file = settings.sagemaker = None
    settings.deepspeed_fields = []

    take_file(settings, environ)
    take_environment(settings, environ)
    return settings


def complete(settings: Namespace, environ: Mapping[str, str], machine: Machine) -> Namespace:
    """Guess, by looking at the machine, what nobody gave; the second half of `resolve`.

    Args:
        settings: What `read_settings` gave; completed in place.
        environ: The environment variables.
        machine: Who answers questions about the machine. Counting accelerators takes seconds.

    Returns:
        `settings`.
    """
    settings.inside_mpi = settings.use_cpu and first_number(environ, MPI_SIZES, 1) > 1
    _guess_machines(settings, machine)
    _guess_processes(settings, machine)
    _guess_threads(settings, environ, machine)
    _guess_deepspeed_launcher(settings, machine)
    settings.runner = next(name for name, applies in RUNNERS.items() if applies(settings))
    _guess_the_rest(settings, machine)
    _look_for_devices(settings, environ, machine)
    _note_what_has_no_effect(settings)
    return settings


def _given(args: Namespace) -> set[str]:
    """Name what the command line gave, or a program set afterwards."""
    values = {name: value for name, value in vars(args).items() if name in OPTIONS and value is not None}
    changed = {name for name, value in values.items() if lower(value) != lower(OPTIONS[name].usual)}
    return {*getattr(args, "nondefault", ()), *changed}


def _guess_machines(settings: Namespace, machine: Machine) -> None:
    """Count the machines: those of the hostfile, else this one."""
    for name in ("deepspeed_hostfile", "mpirun_hostfile"):
        if path := getattr(settings, name):
            setattr(settings, name, os.path.expanduser(path))
    hostfile = settings.deepspeed_hostfile if settings.use_deepspeed else settings.mpirun_hostfile
    wanted = hostfile if settings.use_deepspeed or settings.use_cpu else None
    settings.hosts = machine.hosts(wanted) if wanted and not settings.inside_mpi else {}
    for name, value in {"num_machines": max(1, len(settings.hosts)), "machine_rank": 0}.items():
        if getattr(settings, name) is None:
            set_value(settings, name, value, "guess")


def _guess_processes(settings: Namespace, machine: Machine) -> None:
    if settings.num_processes is not None or settings.sagemaker or settings.tpu:  # torch_xla counts the cores
        return
    per_machine = 1
    if not settings.use_cpu:
        chosen = chosen_devices(settings)
        per_machine = len(chosen) if chosen else max(1, machine.num_devices())
    set_value(settings, "num_processes", per_machine * settings.num_machines, "guess")
    if per_machine > 1:
        which = f"accelerator of --gpu_ids {settings.gpu_ids}" if chosen_devices(settings) else "accelerator found"
        settings.notes.append(f"starting {per_machine} processes, one for each {which}; --num_processes 1 starts one.")


def _guess_threads(settings: Namespace, environ: Mapping[str, str], machine: Machine) -> None:
    if settings.num_cpu_threads_per_process is not None or environ.get("OMP_NUM_THREADS") or settings.sagemaker:
        return
    threads = 1
    if settings.use_cpu:
        per_machine = max(1, settings.num_processes // max(1, settings.num_machines))
        threads = max(1, machine.num_cores() // first_number(environ, MPI_LOCAL_SIZES, per_machine))
    set_value(settings, "num_cpu_threads_per_process", threads, "guess")


def _guess_deepspeed_launcher(settings: Namespace, machine: Machine) -> None:
    """DeepSpeed's own launcher needs a list of machines; without one, this command is run on each of them."""
    settings.has_usual_hostfile = settings.use_deepspeed and machine.exists(DEEPSPEED_HOSTFILE)
    if not settings.use_deepspeed or settings.deepspeed_multinode_launcher is not None:
        return
    listed = settings.deepspeed_hostfile or settings.has_usual_hostfile
    set_value(settings, "deepspeed_multinode_launcher", "pdsh" if listed else STANDARD, "guess")


def _guess_the_rest(settings: Namespace, machine: Machine) -> None:
    for name, value in {"mixed_precision": "no", "dynamo_backend": "no", "debug": False}.items():
        if getattr(settings, name) is None:
            setattr(settings, name, value)
    settings.visible_devices_variable = "CUDA_VISIBLE_DEVICES"
    if chosen_devices(settings) and not settings.use_cpu:
        settings.visible_devices_variable = machine.visible_devices_variable()
    if settings.tpu and settings.main_training_function is None:
        set_value(settings, "main_training_function", "main", "guess")
    settings.mpi_version = machine.mpi_version() if settings.runner == "mpi" else ""
    settings.is_root = machine.is_root()
    settings.port_was_named = bool(settings.main_process_port)
    if settings.runner in MEETING_HERE and settings.num_machines == 1:
        if not settings.main_process_port:
            settings.sources["main_process_port"] = "guess"
        settings.main_process_port = machine.port(settings.main_process_port)


def _look_for_devices(settings: Namespace, environ: Mapping[str, str], machine: Machine) -> None:
    """Find out whether accelerators that were asked for are missing; only those who asked wait for the answer."""
    settings.lacks_devices_for = ""
    wanted = {
        "--multi_gpu": settings.multi_gpu,
        f"--gpu_ids {settings.gpu_ids}": chosen_devices(settings),
    }
    asked_for = [words for words, value in wanted.items() if value]
    elsewhere = settings.runner not in RUNS_HERE or "ACCELERATE_TORCH_DEVICE" in environ
    if not asked_for or settings.use_cpu or elsewhere or machine.has_devices():
        return
    if any(settings.sources.get(name) == "flag" for name in ("multi_gpu", "gpu_ids")):
        settings.lacks_devices_for = " and ".join(asked_for)
    else:
        settings.notes.append(
            f"{settings.settings_file or 'the environment'} asks for GPUs, and this machine has none: the processes "
            "compute on the CPU. --cpu says so without this note."
        )


def _note_what_has_no_effect(settings: Namespace) -> None:
    for name, why in RETIRED_FLAGS.items():
        if getattr(settings, name, False):
            settings.notes.append(f"--{name} has no effect any more: {why}.")
    if settings.use_cpu and chosen_devices(settings) and settings.sources.get("gpu_ids") == "flag":
        settings.notes.append("--gpu_ids has no effect with --cpu.")
    if str(settings.fp8_backend).lower() == "msamp":
        settings.notes.append("MS-AMP is no longer maintained: --fp8_backend ao or te will outlive it.")
    if settings.max_restarts > 0 and settings.num_machines > 1 and settings.rdzv_backend == "static":
        settings.notes.append("restarts on several machines need --rdzv_backend c10d on each of them.")
    for group in GROUPS:
        flags = [f"--{row.name}" for row in group.options if settings.sources.get(row.name) == "flag"]
        if flags and not group.handed_when(settings):
            settings.notes.append(f"{', '.join(flags)}: no effect without {group.counts_with or group.shown_with}.")


def _is_alone(settings: Namespace) -> bool:
    """True for one process that needs no process group."""
    grouped = settings.multi_gpu or settings.use_fsdp or settings.use_megatron_lm or settings.use_deepspeed
    return settings.num_processes == 1 and settings.num_machines == 1 and not grouped


def _needs_no_agent(settings: Namespace) -> bool:
    """True when all that torch's agent would do is to start CPU processes on this machine."""
    usual = all(getattr(settings, name) == OPTIONS[name].default for name in AGENT_OPTIONS)
    plain = settings.use_cpu and settings.num_machines == 1 and not settings.use_deepspeed
    return bool(plain and usual and os.name == "posix")


def _has_deepspeed_launcher(settings: Namespace) -> bool:
    """True when DeepSpeed's launcher, not torch's agent, reaches the other machines."""
    return bool(
        settings.use_deepspeed and settings.num_machines > 1 and settings.deepspeed_multinode_launcher != STANDARD
    )


# who starts the processes: the first that applies
RUNNERS: dict[str, Callable[[Namespace], bool]] = {
    "sagemaker": lambda settings: settings.sagemaker is not None,
    "tpu_pod": lambda settings: settings.tpu and settings.tpu_use_cluster,
    "tpu": lambda settings: settings.tpu,
    "simple": lambda settings: settings.inside_mpi or (_is_alone(settings) and not settings.hosts),
    "mpi": lambda settings: settings.use_cpu and bool(settings.mpirun_hostfile) and not settings.use_deepspeed,
    "deepspeed": _has_deepspeed_launcher,
    "local": _needs_no_agent,
    "torchrun": lambda settings: True,
}


def chosen_devices(settings: Namespace) -> list[str]:
    """List the accelerators that `--gpu_ids` names; empty for all of them."""
    words = [word.strip() for word in str(settings.gpu_ids or "all").split(",")]
    return [] if words == ["all"] else [word for word in words if word]
