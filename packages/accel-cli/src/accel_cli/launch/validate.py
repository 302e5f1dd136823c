"""Checks of the settings before anything starts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from accel_cli.errors import MissingFileError, MissingHereError, NotHereError, UsageError, did_you_mean
from accel_cli.launch.flags.table import groups_of, value_of
from accel_cli.launch.resolve import chosen_devices
from accel_cli.launch.settings import LaunchSettings
from accel_cli.launch.values import check_choice
from accel_state.clusters import NODE_CLUSTERS


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


HARDWARE = ("cpu", "multi_gpu", "tpu")
ENGINES = ("use_deepspeed", "use_fsdp", "use_megatron_lm")
# hardware -> the engines that may be combined with it
COMBINABLE = {"cpu": ENGINES, "multi_gpu": ("use_megatron_lm",)}

NUMBERED = ("fsdp_sharding_strategy", "fsdp_auto_wrap_policy", "fsdp_backward_prefetch", "fsdp_state_dict_type")
NEEDS_NO_HOSTFILE = ("slurm",)  # DeepSpeed's launchers that do not get the machines from a hostfile

# runners with a rendezvous of their own, which need no address
OWN_RENDEZVOUS = ("mpi", "deepspeed", "tpu", "tpu_pod", "sagemaker", "ray")


def check_flags(settings: LaunchSettings) -> None:
    """Check for combinations of flags that are not valid, whatever the config file contains.

    Args:
        settings: The settings of the command line, from `from_namespace`.

    Raises:
        ValueError: Flags contradict one another, or a value is not possible.
    """
    _check_exclusive(settings)
    if settings.module and settings.no_python:
        raise UsageError("--module and --no_python exclude one another. Give only one of them.")
    if settings.multi_gpu and settings.num_processes == 1:
        raise UsageError("--multi_gpu needs at least 2 processes, got --num_processes 1. Leave one of the two out.")
    for name, least in {"num_processes": 1, "num_machines": 1, "num_cpu_threads_per_process": 1}.items():
        value = getattr(settings, name)
        if value is not None and value < least:
            raise UsageError(f"--{name} must be at least {least}, got {value}.")
    _check_together(settings)
    _check_launcher(settings)


def check_settings(settings: LaunchSettings, *, script: bool = True) -> tuple[str, ...]:
    """Check that the settings can be launched.

    Args:
        settings: The resolved settings.
        script: Whether to check the script, too.

    Returns:
        Notes for the user.

    Raises:
        ValueError: They contradict one another.
        FileNotFoundError: The script does not exist.
    """
    checks = (check for check in CHECKS if script or check is not check_script)
    return tuple(note for check in checks for note in only_warn_in_dry_run(check, settings))


def only_warn_in_dry_run(check: Callable[[LaunchSettings], None], settings: LaunchSettings) -> tuple[str, ...]:
    """Run a check. In a dry run, an error about this machine alone is returned as a note instead of raised."""
    try:
        check(settings)
    except NotHereError as error:
        if not settings.dry_run:
            raise
        return (f"a launch on this machine would fail: {error}",)
    return ()


def _check_exclusive(settings: LaunchSettings) -> None:
    hardware, engines = ([name for name in names if getattr(settings, name)] for names in (HARDWARE, ENGINES))
    given = [*hardware, *engines]
    alone = len(hardware) == len(engines) == 1 and engines[0] in COMBINABLE.get(hardware[0], ())
    if len(given) > 1 and not alone:
        flags = " and ".join(f"--{name}" for name in given)
        raise UsageError(f"{flags} exclude one another. Give only one of them.")


def _check_together(settings: LaunchSettings) -> None:
    """Check for flags that contradict one another."""
    for flag, other, why in CONTRADICTIONS:
        if getattr(settings, flag) and getattr(settings, other):
            raise UsageError(f"--{flag} and --{other} contradict one another: {why}. Leave one of them out.")


def _check_launcher(settings: LaunchSettings) -> None:
    """Check for flags that say what Ray decides, or that its workers lack."""
    if settings.launcher != "ray":
        return
    for name in (
        "num_machines",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "hang_timeout",
        "gpu_ids",
        "log_dir",
    ):
        if getattr(settings, name) is not None:
            raise UsageError(
                f"--launcher ray and --{name} exclude one another: {WITHOUT_RAY.get(name, RAY_PLACES)} Leave one of them out."
            )


RAY_PLACES = "Ray places the workers, and gives them their address."
WITHOUT_RAY = {
    "hang_timeout": "the launch does not see the processes of other machines.",
    "gpu_ids": "Ray gives each worker its GPUs (--ray_resources).",
    "log_dir": "Ray has log files of its own.",
}

# flag, flag, why they contradict one another
CONTRADICTIONS = (
    ("launcher", "tpu", "Ray Train starts no processes of torch_xla"),
    ("launcher", "mpirun_hostfile", "both start the processes"),
    ("launcher", "deepspeed_hostfile", "both start the processes"),
    ("mpirun_hostfile", "multi_gpu", "mpirun starts CPU processes"),
    ("mpirun_hostfile", "tpu", "mpirun starts CPU processes"),
    ("mpirun_hostfile", "use_deepspeed", "DeepSpeed has --deepspeed_hostfile"),
    ("deepspeed_inclusion_filter", "deepspeed_exclusion_filter", "one says what to use, the other what to leave out"),
)


def _check_processes(settings: LaunchSettings) -> None:
    count, machines = settings.num_processes, settings.num_machines
    if settings.launcher and settings.sources.get("num_processes") == "guess":
        raise UsageError(
            "--launcher ray needs --num_processes: the number of workers, each of which reserves a GPU or a CPU core."
        )
    if settings.sagemaker or count is None:  # counted by SageMaker or torch_xla
        return
    if settings.sources.get("num_processes") == "file" and count == -1:
        raise UsageError(
            "The config file has num_processes: -1, which leaves it to the command line. Give --num_processes."
        )
    if count < 1:
        raise UsageError(f"num_processes must be at least 1, got {count}.")
    if machines < 1:
        raise UsageError(f"num_machines must be at least 1, got {machines}.")
    if count % machines:
        raise UsageError(
            f"num_processes must be divisible by num_machines, got {count} processes and {machines} machines. It is the "
            "number of processes on all machines together."
        )


def _check_machines(settings: LaunchSettings) -> None:
    port = settings.main_process_port
    if port is not None and not 0 <= port <= 65535:
        raise UsageError(f"main_process_port must be between 0 and 65535, got {port}.")
    if settings.num_machines == 1 or settings.runner in OWN_RENDEZVOUS:
        return
    if not 0 <= settings.machine_rank < settings.num_machines:
        raise UsageError(
            f"machine_rank must be between 0 and {settings.num_machines - 1} for {settings.num_machines} machines, "
            f"got {settings.machine_rank}."
        )
    for name in ("main_process_ip", "main_process_port"):
        if not getattr(settings, name):
            variable = next(
                (row.master_addr or row.addresses for row in NODE_CLUSTERS if row.name == settings.cluster), None
            )
            advice = f", or set {variable}" if variable and name == "main_process_ip" else ""
            raise UsageError(
                f"{settings.num_machines} machines need the address of machine 0 for the rendezvous. Give --{name}{advice}."
            )


def _check_port(settings: LaunchSettings) -> None:
    """Check that the port that the user chose is not taken on this machine."""
    meets_here = settings.runner in ("local", "torchrun") and (settings.num_machines == 1 or _hosts_static(settings))
    port = settings.main_process_port
    if not (meets_here and settings.port_was_named and port):
        return
    from accel_cli.launch.machine import holder_of, is_free

    if not is_free(port):
        raise NotHereError(
            f"Port {port} of this machine is taken by {holder_of(port)}. "
            "Give another --main_process_port, or 0 for a free one."
        )


def _hosts_static(settings: LaunchSettings) -> bool:
    return bool(settings.machine_rank == 0 and settings.rdzv_backend == "static")


def _check_devices(settings: LaunchSettings) -> None:
    if settings.device_fault:
        raise NotHereError(settings.device_fault)
    chosen = chosen_devices(settings)
    here = settings.num_processes // settings.num_machines if settings.num_processes else 0
    if chosen and not settings.use_cpu and not settings.sagemaker and here > len(chosen):
        raise UsageError(
            f"--gpu_ids {settings.gpu_ids} names {len(chosen)} devices, too few for the {here} processes of this machine. "
            f"Name more, or give --num_processes {len(chosen) * settings.num_machines}."
        )


def _check_deepspeed(settings: LaunchSettings) -> None:
    if not settings.use_deepspeed:
        return
    launcher = str(settings.deepspeed_multinode_launcher).lower()
    own = value_of(settings, "deepspeed_config_file")
    if own and not os.path.exists(own) and not _is_encoded(own):
        raise MissingHereError(f"The DeepSpeed configuration {own!r} does not exist (looked for in {os.getcwd()!r}).")
    knows = settings.hosts or settings.has_default_hostfile or launcher in NEEDS_NO_HOSTFILE
    if settings.runner == "deepspeed" and not knows:
        raise UsageError(
            f"--deepspeed_multinode_launcher {launcher} needs a list of machines. Give --deepspeed_hostfile, or use "
            "--deepspeed_multinode_launcher standard."
        )


def _is_encoded(text: str) -> bool:
    """Whether a configuration is base64 instead of the path of a file, as DeepSpeed allows."""
    import base64
    import binascii

    try:
        return base64.urlsafe_b64decode(text).lstrip().startswith(b"{")
    except (binascii.Error, ValueError):
        return False


def _check_agent(settings: LaunchSettings) -> None:
    """Check values for which torch's elastic agent would show a traceback."""
    if settings.max_restarts < 0:
        raise UsageError(f"max_restarts must not be negative, got {settings.max_restarts}.")
    if settings.hang_timeout is not None and settings.hang_timeout <= 0:
        raise UsageError(f"hang_timeout must be above 0 seconds, got {settings.hang_timeout}.")
    if settings.hang_timeout is not None and settings.no_python:
        raise UsageError(
            "--hang_timeout and --no_python exclude one another: only Python processes can report their stacks. Leave "
            "one of them out."
        )
    if settings.shutdown_timeout is not None and settings.shutdown_timeout < 0:
        raise UsageError(f"shutdown_timeout must not be below 0 seconds, got {settings.shutdown_timeout}.")
    if settings.monitor_interval <= 0:
        raise UsageError(f"monitor_interval must be above 0 seconds, got {settings.monitor_interval}.")
    if not re.fullmatch(r"[0-3]|(\d+:[0-3],?)+", settings.tee):
        raise UsageError(
            f"tee must be 0, 1, 2 or 3, or pairs like 0:1,1:3 for single processes, got {settings.tee!r}."
        )
    if not re.fullmatch(r"([^=,]+=[^=,]*,?)*", settings.rdzv_conf):
        raise UsageError(f"rdzv_conf must be pairs like timeout=60,read_timeout=30, got {settings.rdzv_conf!r}.")


def _check_precision(settings: LaunchSettings) -> None:
    if str(settings.mixed_precision).lower() != "fp8":
        return
    from accel_state.libraries import is_fp8_available

    if not is_fp8_available():
        raise NotHereError(
            "mixed_precision 'fp8' needs torchao, Transformer Engine or MS-AMP, and none of them is installed. Install one, "
            "or choose 'bf16'."
        )


def _check_parallelism(settings: LaunchSettings) -> None:
    if not settings.use_parallelism_config:
        return
    shards = value_of(settings, "parallelism_config_dp_shard_size")
    if shards > 1 and not (settings.use_fsdp or settings.use_deepspeed):
        raise UsageError(
            f"--parallelism_config_dp_shard_size {shards} needs --use_fsdp --fsdp_version 2, which shards parameters. "
            "For replicas, use --parallelism_config_dp_replicate_size."
        )


def check_script(settings: LaunchSettings) -> None:
    """Check that the script, module or program exists, and that a script has no syntax error.

    Raises:
        ValueError: There is no such module, or the script has a syntax error.
        FileNotFoundError: There is no such file.
    """
    script = settings.training_script
    if settings.module:
        _check_module(script)
    elif settings.no_python:
        _check_program(script)
    elif script != "-" and not os.path.exists(script):
        folder = os.path.dirname(script) or "."
        siblings = [os.path.join(os.path.dirname(script), name) for name in _names(folder) if name.endswith(".py")]
        hint = did_you_mean(script, siblings) or _other_kind(script)
        raise MissingFileError(f"The script {script!r} does not exist.{hint}")
    elif script.endswith(".py"):
        _check_syntax(script)
    elif script.endswith(".ipynb"):
        raise UsageError(
            f"{script!r} is a notebook, which Python cannot run. Convert it (jupyter nbconvert --to script {script}) and launch the "
            "script, or call notebook_launcher(function) in the notebook."
        )


def _check_syntax(script: str) -> None:
    """Check for a syntax error here, so that it is shown once and not by each process."""
    import warnings

    try:
        with open(script, "rb") as file:
            source = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the processes warn
            compile(source, script, "exec", dont_inherit=True)
    except SyntaxError as error:
        import traceback

        text = "".join(traceback.format_exception_only(error)).rstrip()
        raise UsageError(f"The script {script!r} has a syntax error:\n{text}") from None
    except (OSError, ValueError):  # left to Python, whose message is better
        return


def _check_module(name: str) -> None:
    import sys
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    top = name.partition(".")[0]
    try:
        spec = PathFinder.find_spec(top, [os.getcwd(), *sys.path]) or find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise UsageError(f"The module {name!r} was not found. Install it, or change to the folder that contains it.")


def _check_program(name: str) -> None:
    import shutil

    if shutil.which(name) is None:
        here = f" Write './{name}' for the file in this folder." if os.path.exists(name) else ""
        raise MissingFileError(f"The program {name!r} was not found, or is not executable.{here}")


def _other_kind(script: str) -> str:
    """How to run a name that is not a file but could be a program or a module."""
    if not re.fullmatch(r"[\w.-]+", script) or script.endswith(".py"):
        return ""
    return f" Write `-m {script}` for a module, or `--no_python {script}` for a program."


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _check_choices(settings: LaunchSettings) -> None:
    """Check choices that would otherwise raise only in the script, in each of its processes."""
    for group in groups_of(settings):
        for option in group.options if group.passed_when(settings) else ():
            value = group.value(option, settings)
            where = {"environment": f"environment variable {option.environment}", "flag": f"--{option.name}"}
            source = settings.sources.get(option.name)
            # accelerate 1.15 accepts the numbers of FSDP's enum values
            if source in where and not (option.name in NUMBERED and str(value).isdigit()):
                check_choice(option, value, where[source])


def _check_engine(settings: LaunchSettings) -> None:
    """Check that a package here has the engine, before processes start that would all look for it."""
    if not settings.engine:
        return
    from importlib.metadata import entry_points

    from accel_state.enums import DistributedType

    built_in = [*(kind.value for kind in DistributedType), "FSDP2"]
    installed = sorted({entry.name for entry in entry_points(group="accelerate.engines")})
    if settings.engine in built_in or settings.engine in installed:
        return
    there_are = f"there are {', '.join(installed)}" if installed else "none is installed"
    raise NotHereError(
        f"--engine {settings.engine}: no installed package registers an engine of this name; {there_are}."
        f"{did_you_mean(settings.engine, [*installed, *built_in])} Install the package on all machines, or leave the flag out."
    )


CHECKS: tuple[Callable[[LaunchSettings], None], ...] = (
    _check_choices, _check_processes, _check_machines, _check_port, _check_devices, _check_agent, check_hosts,
    _check_deepspeed, _check_precision, _check_parallelism, _check_engine, check_script,
)  # fmt: skip
