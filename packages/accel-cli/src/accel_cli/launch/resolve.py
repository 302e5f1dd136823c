"""Resolving launch settings: flag, then config file, then environment variable, then the cluster's job, then a guess."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from accel_cli.arguments import Flag
from accel_cli.errors import UsageError
from accel_cli.launch.cluster import take_cluster
from accel_cli.launch.flags.group import OptionGroup
from accel_cli.launch.flags.table import GROUPS, find, groups_of, value_of
from accel_cli.launch.from_file import HARDWARE_FLAGS, take_file
from accel_cli.launch.machine import Machine
from accel_cli.launch.settings import ROWS, LaunchSettings
from accel_cli.launch.values import coerce, first_number

if TYPE_CHECKING:
    from accel_state.nvidia import MissingGpus


ENGINES = ("use_deepspeed", "use_fsdp", "use_megatron_lm")  # one excludes the others

SHARED_VARIABLES = (
    "CCL_WORKER_COUNT",
    "OMP_NUM_THREADS",
)  # may have values that we cannot parse, and are passed to the script unchanged

# environment variable -> why it is retired
RETIRED_VARIABLES = {
    "ACCELERATE_USE_IPEX": "Intel Extension for PyTorch is retired, and torch has its features",
    "ACCELERATE_USE_XPU": "Intel GPUs are detected without it",
}


def take_environment(settings: LaunchSettings, environ: Mapping[str, str]) -> LaunchSettings:
    """Set every option that neither a flag nor the config file has set from its environment variable.

    Args:
        settings: The settings so far.
        environ: The environment variables; empty ones are ignored.

    Returns:
        The settings with the values of the variables.

    Raises:
        ValueError: For a value that is not allowed.
    """
    settings = _take_cpu(settings, environ)
    for group in groups_of(settings):
        if group.enabled_by:
            settings = _take_engine(settings, group, environ)
        if group.passed_when(settings):
            pairs = (_read(option, environ) for option in group.options if option.name not in settings.sources)
            values = {name: value for pair in pairs if pair is not None for name, value in (pair,)}
            if values:
                settings = settings.with_values(values, "environment")
    retired = ((name, why) for name, why in RETIRED_VARIABLES.items() if environ.get(name))
    return settings.with_notes(
        *(f"the environment variable {name} has no effect any more, because {why}." for name, why in retired)
    )


def _take_cpu(settings: LaunchSettings, environ: Mapping[str, str]) -> LaunchSettings:
    wanted = environ.get("ACCELERATE_USE_CPU")
    chosen = settings.settings_file is not None or any(getattr(settings, flag) for flag in HARDWARE_FLAGS)
    if not wanted or chosen:
        return settings
    use_cpu = coerce(ROWS["cpu"], wanted, "environment variable ACCELERATE_USE_CPU")
    return settings.with_changes(use_cpu=use_cpu, sources={**settings.sources, "cpu": "environment"})


def _take_engine(settings: LaunchSettings, group: OptionGroup, environ: Mapping[str, str]) -> LaunchSettings:
    """Enable an engine, unless the command line or the config file has chosen another."""
    flag = group.shown_with.lstrip("-")
    word = environ.get(group.enabled_by)
    other = [engine for engine in ENGINES if engine != flag and getattr(settings, engine)] if flag in ENGINES else []
    if not word or other or getattr(settings, flag):
        return settings
    wanted = coerce(ROWS[flag], word, f"environment variable {group.enabled_by}")
    return settings.with_values({flag: True}, "environment") if wanted else settings


def _read(option: Flag, environ: Mapping[str, str]) -> tuple[str, Any] | None:
    """Read the variable of an option: the option's name and value, or None if the variable is not set."""
    variables = option.environment.split()
    names = [name for name in variables if environ.get(name)]
    if not names:
        return None
    text = environ[names[0]]
    if len(variables) > 1:  # one item of a sequence each; those not set keep their default
        text = ",".join(environ.get(name) or str(item) for name, item in zip(variables, option.default, strict=True))
    try:
        return option.name, coerce(option, text, f"environment variable {' '.join(names)}")
    except UsageError:
        if option.environment in SHARED_VARIABLES:
            return None
        raise


NO_OPTIONS = ("nondefault", "func")  # entries of a parsed command line that are not options

# the number of processes on this machine when mpirun started this one
MPI_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")

PROCESSES_OF_PODS = "PET_NPROC_PER_NODE"
ONE_FOR_EACH_DEVICE = ("auto", "gpu")  # its values for which accelerators are counted

DEEPSPEED_HOSTFILE = "/job/hostfile"  # DeepSpeed's default
STANDARD = "standard"  # this command is run on each machine, with torch's agents
AGENT_OPTIONS = (
    "max_restarts",
    "tee",
    "log_dir",
    "role",
    "rdzv_backend",
    "rdzv_conf",
)  # which only torch's agent supports
RENDEZVOUS_HERE = (
    "local",
    "torchrun",
    "mpi",
)  # runners with a rendezvous at a port of this machine, if it is the only one

RUNS_HERE = ("simple", "local", "torchrun")  # runners whose processes compute on this machine

RETIRED_FLAGS = {
    "ipex": "Intel Extension for PyTorch is retired, and torch has its features",
    "use_xpu": "Intel GPUs are detected without it",
}


def resolve(
    args: Namespace, environ: Mapping[str, str] | None = None, machine: Machine | None = None
) -> LaunchSettings:
    """Resolve a parsed command line to complete settings.

    Args:
        args: The parsed command line; it is not changed. A program may have changed it, or have built one by hand:
            options that it lacks have their default, and values other than the default are taken as given.
        environ: The environment variables; those of this process when None.
        machine: Queries about the machine.

    Returns:
        The settings, with every field resolved.

    Raises:
        ValueError: A value is not valid.
        FileNotFoundError: The config file of `--config_file` does not exist.
    """
    environ = os.environ if environ is None else environ
    return complete(read_settings(args, environ), environ, machine or Machine())


def read_settings(args: Namespace, environ: Mapping[str, str]) -> LaunchSettings:
    """Read all flags, the config file, the environment variables and the cluster's job; the first half of `resolve`.

    Raises:
        ValueError: For values that are not allowed.
        FileNotFoundError: When the config file that was named does not exist.
    """
    settings = from_namespace(args)
    settings = settings.with_changes(sources=dict.fromkeys(_given(args, settings), "flag"), use_cpu=settings.cpu)
    return take_cluster(take_environment(take_file(settings, environ), environ), environ)


def from_namespace(args: Namespace) -> LaunchSettings:
    """Read the values of a parsed command line, or of one that a program has built; nothing is resolved."""
    values = vars(args)
    own = {name: values.get(name, row.initial) for name, row in ROWS.items()}
    others = {name: value for name, value in values.items() if name not in NO_OPTIONS and name not in ROWS}
    return LaunchSettings(**own, options={name: value for name, value in others.items() if find(name) is not None})


def complete(settings: LaunchSettings, environ: Mapping[str, str], machine: Machine) -> LaunchSettings:
    """Guess the values that were not given, by the hardware of this machine; the second half of `resolve`.

    Args:
        settings: The settings of `read_settings`.
        environ: The environment variables.
        machine: Queries about the machine. Counting accelerators takes seconds.

    Returns:
        The settings, with every field resolved.
    """
    settings = _guess_machines(settings, machine)
    settings = _guess_processes(settings, environ, machine)
    settings = _guess_threads(settings, environ, machine)
    settings = _guess_deepspeed_launcher(settings, machine)
    settings = settings.with_changes(runner=next(name for name, applies in RUNNERS.items() if applies(settings)))
    settings = _guess_the_rest(settings, machine)
    settings = _look_for_devices(settings, environ, machine)
    return settings.with_notes(*_without_effect(settings))


def _given(args: Namespace, settings: LaunchSettings) -> set[str]:
    """The names of options given on the command line, or set by a program afterwards."""
    values = {name: value for name, value in vars(args).items() if name in ROWS or name in settings.options}
    given = set(getattr(args, "nondefault", ()))
    for name, value in values.items():
        option = find(name)
        if option is not None and value is not None and str(value).lower() != str(option.initial).lower():
            given.add(name)
    return given


def _guess_machines(settings: LaunchSettings, machine: Machine) -> LaunchSettings:
    """Count the machines of the hostfile, or only this one."""
    settings = settings.with_changes(
        deepspeed_hostfile=_expanded(settings.deepspeed_hostfile), mpirun_hostfile=_expanded(settings.mpirun_hostfile)
    )
    hostfile = settings.deepspeed_hostfile if settings.use_deepspeed else settings.mpirun_hostfile
    wanted = hostfile if settings.use_deepspeed or settings.use_cpu else None
    hosts = machine.hosts(wanted) if wanted and not settings.started_by else {}
    guesses = {"num_machines": max(1, len(hosts)), "machine_rank": 0}
    return settings.with_changes(hosts=hosts).with_values(
        {name: value for name, value in guesses.items() if getattr(settings, name) is None}, "guess"
    )


def _expanded(path: str | None) -> str | None:
    return os.path.expanduser(path) if path else path


def _guess_processes(settings: LaunchSettings, environ: Mapping[str, str], machine: Machine) -> LaunchSettings:
    counted = settings.num_processes is not None
    if counted or settings.sagemaker or settings.tpu:  # torch_xla counts the cores
        return settings
    per_machine = 1
    chosen = chosen_devices(settings)
    if not settings.use_cpu:
        num_devices = len(chosen) or machine.num_devices()
        per_machine = max(1, num_devices)
        asked = environ.get(PROCESSES_OF_PODS)
        if not num_devices and settings.cluster == "Kubeflow" and asked in ONE_FOR_EACH_DEVICE:
            fault = f"{PROCESSES_OF_PODS}={asked} is one process for each accelerator, and this machine has none."
            settings = settings.with_changes(device_fault=f"{fault} Give --cpu to train on the CPU, or set a number.")
    settings = settings.with_values({"num_processes": per_machine * settings.num_machines}, "guess")
    if per_machine == 1 or not machine.is_here:
        return settings
    here = f" of {settings.num_processes}" if settings.num_machines > 1 else ""
    which = f"accelerator of --gpu_ids {settings.gpu_ids}" if chosen else "accelerator found"
    return settings.with_notes(
        f"starting {per_machine}{here} processes, one for each {which}. To start a single one, give --num_processes 1."
    )


def _guess_threads(settings: LaunchSettings, environ: Mapping[str, str], machine: Machine) -> LaunchSettings:
    if settings.num_cpu_threads_per_process is not None or environ.get("OMP_NUM_THREADS") or settings.sagemaker:
        return settings
    threads = 1
    if settings.use_cpu:
        per_machine = max(1, settings.num_processes // max(1, settings.num_machines))
        threads = max(1, machine.num_cores() // first_number(environ, MPI_LOCAL_SIZES, per_machine))
    return settings.with_values({"num_cpu_threads_per_process": threads}, "guess")


def _guess_deepspeed_launcher(settings: LaunchSettings, machine: Machine) -> LaunchSettings:
    """DeepSpeed's own launcher needs a hostfile; without one, this command is run on each machine."""
    settings = settings.with_changes(
        has_default_hostfile=settings.use_deepspeed and machine.exists(DEEPSPEED_HOSTFILE)
    )
    named = settings.deepspeed_multinode_launcher is not None
    if not settings.use_deepspeed or named:
        return settings
    listed = settings.deepspeed_hostfile or settings.has_default_hostfile
    return settings.with_values({"deepspeed_multinode_launcher": "pdsh" if listed else STANDARD}, "guess")


def _guess_the_rest(settings: LaunchSettings, machine: Machine) -> LaunchSettings:
    settings = settings.with_changes(
        mixed_precision=settings.mixed_precision or "no",
        debug=bool(settings.debug),
        is_root=machine.is_root(),
        mpi_version=machine.mpi_version() if settings.runner == "mpi" else "",
        port_was_named=bool(settings.main_process_port),
    )
    if value_of(settings, "dynamo_backend") is None:
        settings = settings.with_changes(options={**settings.options, "dynamo_backend": "no"})
    if chosen_devices(settings) and not settings.use_cpu:
        settings = settings.with_changes(visible_devices_variable=machine.visible_devices_variable())
    if settings.tpu and settings.main_training_function is None:
        settings = settings.with_values({"main_training_function": "main"}, "guess")
    if settings.runner in RENDEZVOUS_HERE and settings.num_machines == 1:
        if not settings.main_process_port:
            settings = settings.with_changes(sources={**settings.sources, "main_process_port": "guess"})
        settings = settings.with_changes(main_process_port=machine.port(settings.main_process_port))
    return settings


def _look_for_devices(settings: LaunchSettings, environ: Mapping[str, str], machine: Machine) -> LaunchSettings:
    """Check for accelerators where flags, file or environment ask for them; this imports torch."""
    chosen = ",".join(chosen_devices(settings))
    wanted = {"--multi_gpu": settings.multi_gpu, f"--gpu_ids {settings.gpu_ids}": chosen}
    asked_for = [words for words, value in wanted.items() if value]
    elsewhere = settings.runner not in RUNS_HERE or "ACCELERATE_TORCH_DEVICE" in environ
    if not asked_for or settings.use_cpu or elsewhere:
        return settings
    if chosen and (fault := machine.fault_of_gpu_ids(chosen)):
        return settings.with_changes(device_fault=_invalid_gpu_ids(settings, fault))
    if machine.has_devices(chosen):
        return settings
    by_flag = any(settings.sources.get(name) == "flag" for name in ("multi_gpu", "gpu_ids"))
    asking = " and ".join(asked_for) if by_flag else settings.settings_file or "the environment"
    return _without_devices(settings, asking, by_flag, machine.missing_gpus(chosen))


def _without_devices(
    settings: LaunchSettings, asking: str, by_flag: bool, missing: MissingGpus | None
) -> LaunchSettings:
    """Add the error or the note of settings that ask for accelerators which the processes would not see.

    A file may be meant for another machine, or its user may want the CPU for once and hide the GPUs: these are noted.

    Args:
        settings: The settings.
        asking: What asks for accelerators.
        by_flag: Whether the command line does.
        missing: Why GPUs of this machine are not seen; None if it has none.
    """
    if missing is None and by_flag:
        return settings.with_changes(
            device_fault=f"{asking} needs a GPU or other accelerator, and this machine has none. Leave it out, or give "
            "--cpu to run on the CPU."
        )
    if missing is not None and (by_flag or not missing.on_purpose):
        return settings.with_changes(
            device_fault=f"{asking} asks for GPUs, and this machine has {missing.gpus}, but {missing.reason}. "
            f"{missing.advice}; to run on the CPU, give --cpu."
        )
    reason = "this machine has none" if missing is None else missing.reason
    return settings.with_notes(
        f"{asking} asks for GPUs, but {reason}. The processes run on the CPU. Give --cpu to do so without this note."
    )


def _invalid_gpu_ids(settings: LaunchSettings, fault: str) -> str:
    """The error for a list of GPUs of which CUDA would show the processes some or none."""
    ids = f"--gpu_ids {settings.gpu_ids}"
    if settings.sources.get("gpu_ids") == "file":
        ids = f"{settings.settings_file}: gpu_ids: {settings.gpu_ids}"
    return f"{ids} {fault}. Name GPUs of this machine, each once, or give --cpu to run on the CPU."


def _without_effect(settings: LaunchSettings) -> Iterator[str]:
    """Yield notes about settings that have no effect."""
    for name, why in RETIRED_FLAGS.items():
        if getattr(settings, name, False):
            yield f"--{name} has no effect any more, because {why}."
    if settings.use_cpu and chosen_devices(settings) and settings.sources.get("gpu_ids") == "flag":
        yield "--gpu_ids has no effect with --cpu."
    if str(settings.fp8_backend).lower() == "msamp":
        yield "--fp8_backend msamp: MS-AMP is no longer maintained. Use --fp8_backend ao or te."
    if settings.max_restarts > 0 and settings.num_machines > 1 and settings.rdzv_backend == "static":
        yield (
            f"--max_restarts {settings.max_restarts} on several machines needs --rdzv_backend c10d on each of them."
        )
    given: dict[str, list[str]] = {}
    for group in GROUPS:
        if group.is_loaded and not group.passed_when(settings):  # a flag that was given has been loaded
            flags = [f"--{row.name}" for row in group.options if settings.sources.get(row.name) == "flag"]
            given.setdefault(group.requires or group.shown_with, []).extend(flags)
    for needed, flags in given.items():
        if flags:
            yield f"{', '.join(flags)}: no effect without {needed}."


def _is_single(settings: LaunchSettings) -> bool:
    """True for one process that needs no process group, nor ranks of its own in the place of another run's."""
    grouped = (
        settings.is_apart
        or settings.multi_gpu
        or settings.use_fsdp
        or settings.use_megatron_lm
        or settings.use_deepspeed
    )
    return settings.num_processes == 1 and settings.num_machines == 1 and not grouped


def _needs_no_agent(settings: LaunchSettings) -> bool:
    """True when torch's agent would only start CPU processes on this machine."""
    plain = all(getattr(settings, name) == ROWS[name].default for name in AGENT_OPTIONS)
    local = settings.use_cpu and settings.num_machines == 1 and not settings.use_deepspeed
    return bool(local and plain)


def _has_deepspeed_launcher(settings: LaunchSettings) -> bool:
    """True when DeepSpeed's launcher, not torch's agent, starts the processes on the other machines."""
    return bool(
        settings.use_deepspeed and settings.num_machines > 1 and settings.deepspeed_multinode_launcher != STANDARD
    )


# which runner starts the processes: the first whose condition is true
RUNNERS: dict[str, Callable[[LaunchSettings], bool]] = {
    "sagemaker": lambda settings: settings.sagemaker is not None,
    "ray": lambda settings: settings.launcher == "ray",
    "tpu_pod": lambda settings: settings.tpu and settings.tpu_use_cluster,
    "tpu": lambda settings: settings.tpu,
    "simple": lambda settings: bool(settings.started_by) or (_is_single(settings) and not settings.hosts),
    "mpi": lambda settings: settings.use_cpu and bool(settings.mpirun_hostfile) and not settings.use_deepspeed,
    "deepspeed": _has_deepspeed_launcher,
    "local": _needs_no_agent,
    "torchrun": lambda settings: True,
}


def chosen_devices(settings: LaunchSettings) -> list[str]:
    """List the accelerators that `--gpu_ids` names; empty for all of them."""
    words = [word.strip() for word in str(settings.gpu_ids or "all").split(",")]
    return [] if words == ["all"] else [word for word in words if word]
