"""From what the user gave to complete settings: flag, then settings file, then environment, then a guess."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from accel_cli.arguments import Option, truth
from accel_cli.configfile.location import default_config_path
from accel_cli.errors import NotInThisReleaseError, UsageError, did_you_mean, without_traceback
from accel_cli.launch.flags.table import OPTIONS
from accel_cli.launch.machine import Machine

HARDWARE_FLAGS = ("cpu", "multi_gpu", "tpu")
MODE_FLAGS = (*HARDWARE_FLAGS, "use_deepspeed", "use_fsdp", "use_megatron_lm")

# distributed_type of a settings file -> the flag that says the same; every MULTI_<accelerator> is --multi_gpu
MODES = {"DEEPSPEED": "use_deepspeed", "FSDP": "use_fsdp", "MEGATRON_LM": "use_megatron_lm", "XLA": "tpu"}
ONE_PROCESS_TYPES = ("NO",)
CPU_TYPES = ("MULTI_CPU",)

# keys that have had another name, or that the questionnaire writes under another name than the flag's
RENAMED_KEYS = {
    "fp8_amax_history_length": "fp8_amax_history_len",
    "fp8_amax_compute_algorithm": "fp8_amax_compute_algo",
    "fp8_optimization_level": "fp8_opt_level",
    "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
}
PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
KEYS_WITHOUT_OPTION = ("mpirun_ccl",)  # written by older versions; there is nothing to do about it

# who counts the processes of one machine, and of all, when mpirun started us
MPI_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def resolve(args: Namespace, environ: Mapping[str, str] | None = None, machine: Machine | None = None) -> Namespace:
    """Complete what was parsed.

    Args:
        args: The parsed command line; it is not changed.
        environ: The environment variables; those of this process when None.
        machine: Who answers questions about the machine.

    Returns:
        The settings: every option, and besides `use_cpu`, `inside_mpi`, `visible_devices_variable`,
        `port_was_named` and

        - `runner`, `"simple"` or `"torchrun"`;
        - `sources`, option name -> `"flag"`, `"file"`, `"environment"` or `"guess"`; an option that is not in it has
          its default;
        - `notes`, what the user should be told.

    Raises:
        ValueError: For values that are not allowed.
        FileNotFoundError: When the settings file that was named does not exist.
    """
    environ = os.environ if environ is None else environ
    machine = machine or Machine()
    settings = Namespace(**vars(args))
    settings.sources = dict.fromkeys(getattr(args, "nondefault", ()), "flag")
    settings.notes = []
    settings.use_cpu = args.cpu

    _take_file(settings, environ)
    _take_environment(settings, environ)
    settings.inside_mpi = settings.use_cpu and _first_number(environ, MPI_SIZES, 1) > 1
    _guess_processes(settings, machine)
    _guess_threads(settings, environ, machine)
    settings.runner = "simple" if settings.inside_mpi or _is_alone(settings) else "torchrun"
    _guess_the_rest(settings, machine)
    return settings


def _set(settings: Namespace, name: str, value: Any, source: str) -> None:
    """Set an option, unless the command line has."""
    if settings.sources.get(name) != "flag":
        setattr(settings, name, value)
        settings.sources[name] = source


def _take_file(settings: Namespace, environ: Mapping[str, str]) -> None:
    """Read the settings file that was named, or the default one if it exists and the command line lets it count."""
    path = settings.config_file
    if path is None:
        path = default_config_path(environ)
        if settings.cpu or not os.path.isfile(path):
            return
    from accel_cli.configfile.read import load_config_from_file
    from accel_cli.configfile.schema import ClusterConfig

    with without_traceback():
        config = load_config_from_file(path)
    if not isinstance(config, ClusterConfig):
        raise NotInThisReleaseError(f"{path!r} is for Amazon SageMaker, where this release cannot start jobs yet.")
    settings.sources["config_file"] = "file"
    values = dict(config.__dict__)
    kind = values.pop("distributed_type").value
    values.pop("compute_environment")
    use_cpu = coerce(OPTIONS["cpu"], values.pop("use_cpu"), "use_cpu")
    if kind in ONE_PROCESS_TYPES:
        values["num_processes"] = 1
    for key, value in values.items():
        if isinstance(value, dict):
            _take_section(settings, key, value)
        elif value is not None and key in OPTIONS:
            _set(settings, key, coerce(OPTIONS[key], value, key), "file")
    _take_mode(settings, kind, use_cpu)


def _take_section(settings: Namespace, section: str, values: dict[str, Any]) -> None:
    prefix = PREFIXES.get(section, "")
    for key, value in values.items():
        name = key if str(key).startswith(prefix) else f"{prefix}{key}"
        name = RENAMED_KEYS.get(name, name)
        if name in OPTIONS:
            if value is not None:
                _set(settings, name, coerce(OPTIONS[name], value, f"{section}.{key}"), "file")
        elif name not in KEYS_WITHOUT_OPTION:
            hint = did_you_mean(name, list(OPTIONS))
            settings.notes.append(f"the settings file has {section}.{key}, which means nothing here.{hint}")
    if section == "parallelism_config" and values:
        _set(settings, "use_parallelism_config", True, "file")


def _take_mode(settings: Namespace, kind: str, use_cpu: bool) -> None:
    """Let the file choose hardware and way of training where the command line does not."""
    given = [flag for flag in MODE_FLAGS if getattr(settings, flag)]
    if not given:
        if kind in MODES:
            _set(settings, MODES[kind], True, "file")
        elif kind not in (*ONE_PROCESS_TYPES, *CPU_TYPES):
            _set(settings, "multi_gpu", True, "file")
    if not any(flag in HARDWARE_FLAGS for flag in given):
        settings.use_cpu = use_cpu or kind in CPU_TYPES


def _take_environment(settings: Namespace, environ: Mapping[str, str]) -> None:
    """Two variables change the launch itself; the others reach the script because nothing overwrites them."""
    precision = environ.get("ACCELERATE_MIXED_PRECISION")
    if settings.mixed_precision is None and precision:
        value = coerce(OPTIONS["mixed_precision"], precision, "environment variable ACCELERATE_MIXED_PRECISION")
        _set(settings, "mixed_precision", value, "environment")
    wants_cpu = environ.get("ACCELERATE_USE_CPU")
    hardware_open = not any(getattr(settings, flag) for flag in MODE_FLAGS) and "config_file" not in settings.sources
    if wants_cpu and hardware_open:
        settings.use_cpu = coerce(OPTIONS["cpu"], wants_cpu, "environment variable ACCELERATE_USE_CPU")


def _guess_processes(settings: Namespace, machine: Machine) -> None:
    settings.num_machines = 1 if settings.num_machines is None else settings.num_machines
    settings.machine_rank = 0 if settings.machine_rank is None else settings.machine_rank
    if settings.num_processes is not None:
        return
    per_machine = 1
    if not settings.use_cpu:
        chosen = chosen_devices(settings)
        per_machine = len(chosen) if chosen else max(1, machine.num_devices())
    _set(settings, "num_processes", per_machine * settings.num_machines, "guess")
    if per_machine > 1:
        settings.notes.append(
            f"starting {per_machine} processes, one for each accelerator found; --num_processes 1 starts one."
        )


def _guess_threads(settings: Namespace, environ: Mapping[str, str], machine: Machine) -> None:
    if settings.num_cpu_threads_per_process is not None or environ.get("OMP_NUM_THREADS"):
        return
    threads = 1
    if settings.use_cpu:
        per_machine = max(1, settings.num_processes // max(1, settings.num_machines))
        threads = max(1, machine.num_cores() // _first_number(environ, MPI_LOCAL_SIZES, per_machine))
    _set(settings, "num_cpu_threads_per_process", threads, "guess")


def _guess_the_rest(settings: Namespace, machine: Machine) -> None:
    for name, value in {"mixed_precision": "no", "dynamo_backend": "no", "debug": False}.items():
        if getattr(settings, name) is None:
            setattr(settings, name, value)
    settings.visible_devices_variable = "CUDA_VISIBLE_DEVICES"
    if chosen_devices(settings) and not settings.use_cpu:
        settings.visible_devices_variable = machine.visible_devices_variable()
    settings.port_was_named = bool(settings.main_process_port)
    if settings.max_restarts > 0 and settings.num_machines > 1 and settings.rdzv_backend == "static":
        settings.notes.append("restarts on several machines need --rdzv_backend c10d on each of them.")
    if settings.runner == "torchrun" and settings.num_machines == 1:
        settings.main_process_port = machine.port(settings.main_process_port)


def _is_alone(settings: Namespace) -> bool:
    """True for one process that needs no process group."""
    grouped = settings.multi_gpu or settings.use_fsdp or settings.use_megatron_lm
    return settings.num_processes == 1 and settings.num_machines == 1 and not grouped


def chosen_devices(settings: Namespace) -> list[str]:
    """List the accelerators that `--gpu_ids` names; empty for all of them."""
    words = [word.strip() for word in str(settings.gpu_ids or "all").split(",")]
    return [] if words == ["all"] else [word for word in words if word]


def coerce(option: Option, value: Any, where: str) -> Any:
    """Turn a value from a file or variable into one that the flag would have given.

    Args:
        option: The row of the option.
        value: What stands there.
        where: The key or variable, for the message.

    Raises:
        ValueError: When the value is not allowed.
    """
    if option.is_switch:
        return value if isinstance(value, bool) else _converted(truth, str(value), where)
    if option.choices is not None:
        word = "no" if value is False else str(value)
        if word.lower() not in [choice.lower() for choice in option.choices]:
            hint = did_you_mean(word, list(option.choices))
            raise UsageError(f"{where}: {value!r} is not one of {', '.join(option.choices)}.{hint}")
        return word
    if isinstance(value, (list, tuple)):
        value = list(value) if option.action == "append" else ",".join(str(item) for item in value)
    if option.type is None or option.action == "append":
        return value
    if isinstance(value, bool) and option.type in (int, float):
        raise UsageError(f"{where}: {value!r} is not a number.")
    return _converted(option.type, str(value), where)


def _converted(kind: Any, text: str, where: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        name = getattr(kind, "__name__", "")
        wanted = {"int": "a whole number", "float": "a number"}.get(name, "a truth value (true or false)")
        raise UsageError(f"{where}: {text!r} is not {wanted}.") from None


def _first_number(environ: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return default
