"""Launch settings from a config file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accel_cli.configfile.location import default_config_path
from accel_cli.errors import did_you_mean, without_traceback
from accel_cli.launch.flags.table import all_options, find, full_name
from accel_cli.launch.settings import ROWS, LaunchSettings
from accel_cli.launch.values import coerce

HARDWARE_FLAGS = ("cpu", "multi_gpu", "tpu")
MODE_FLAGS = (*HARDWARE_FLAGS, "use_deepspeed", "use_fsdp", "use_megatron_lm")

# distributed_type of a config file -> the equivalent flag; every MULTI_<accelerator> is --multi_gpu
MODES = {"DEEPSPEED": "use_deepspeed", "FSDP": "use_fsdp", "MEGATRON_LM": "use_megatron_lm", "XLA": "tpu"}
MODES_ON_CPU = ("use_deepspeed", "use_fsdp")
ONE_PROCESS_TYPES = ("NO",)
CPU_TYPES = ("MULTI_CPU",)

# keys that are written under another name than the flag's
RENAMED_KEYS = {"tpu_vm": "vm", "tpu_env": "env"}


def take_file(settings: LaunchSettings, environ: Mapping[str, str]) -> LaunchSettings:
    """Read the config file of `--config_file`, or the default one if it exists and `--cpu` is not given.

    Args:
        settings: The settings so far.
        environ: The environment variables, for the path of the default file.

    Returns:
        The settings with the values of the file.

    Raises:
        FileNotFoundError: The file of `--config_file` does not exist.
        ValueError: A value in it is not valid.
    """
    path = settings.config_file
    if path is None:
        path = default_config_path(environ)
        if settings.cpu or not os.path.isfile(path):
            return settings
    from accel_cli.configfile.read import load_config_from_file
    from accel_cli.configfile.schema import ClusterConfig, SageMakerConfig

    with without_traceback():
        config = load_config_from_file(path)
    if isinstance(config, SageMakerConfig):
        return _take_sagemaker(settings, config, path)
    assert isinstance(config, ClusterConfig)
    values = dict(config.__dict__)
    kind = values.pop("distributed_type").value
    values.pop("compute_environment")
    use_cpu = coerce(ROWS["cpu"], values.pop("use_cpu"), "use_cpu")
    if kind in ONE_PROCESS_TYPES:
        values["num_processes"] = 1
    settings = settings.with_changes(settings_file=path, deepspeed_fields=_deepspeed_fields(config))
    return _take_mode(_take_values(settings, values), kind, use_cpu)


def _take_values(settings: LaunchSettings, values: Mapping[str, Any]) -> LaunchSettings:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = RENAMED_KEYS.get(key, key)
        if isinstance(value, dict):
            settings = _take_section(settings, key, value)
        elif value is not None and name in ROWS:
            found[name] = coerce(ROWS[name], value, key)
    return settings.with_values(found, "file")


def _take_section(settings: LaunchSettings, section: str, values: dict[str, Any]) -> LaunchSettings:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = full_name(section, str(key))
        option = find(name)
        if option is None:
            settings = settings.with_notes(_unknown_key(settings.settings_file, section, key, name))
        elif value is not None:
            found[name] = coerce(option, value, f"{section}.{key}")
    if section == "parallelism_config" and values:
        found["use_parallelism_config"] = True
    return settings.with_values(found, "file")


def _unknown_key(path: str | None, section: str, key: Any, name: str) -> str:
    from accel_cli.configfile.source import read_source

    where = read_source(path or "").at(f"{section}.{key}")
    return f"{where}: {section}.{key} is not an option and has no effect.{did_you_mean(name, list(all_options()))}"


def _take_mode(settings: LaunchSettings, kind: str, use_cpu: bool) -> LaunchSettings:
    """Choose hardware and engine by the file where the command line does not."""
    given = [flag for flag in MODE_FLAGS if getattr(settings, flag)]
    engine = MODES.get(kind)
    if engine and (not given or (given == ["cpu"] and engine in MODES_ON_CPU)):
        settings = settings.with_values({engine: True}, "file")
    elif not given and kind not in (*ONE_PROCESS_TYPES, *CPU_TYPES):
        settings = settings.with_values({"multi_gpu": True}, "file")
    if any(flag in HARDWARE_FLAGS for flag in given):
        return settings
    return settings.with_changes(use_cpu=use_cpu or kind in CPU_TYPES, sources={**settings.sources, "cpu": "file"})


def _deepspeed_fields(config: Any) -> tuple[str, ...]:
    """The fields of the file that a DeepSpeed configuration file would contain, too."""
    fields = tuple(str(key) for key in config.deepspeed_config)
    return (*fields, "mixed_precision") if fields and config.mixed_precision else fields


def _take_sagemaker(settings: LaunchSettings, config: Any, path: str) -> LaunchSettings:
    """Plan a job on Amazon SageMaker, unless the command line names hardware or an engine for this machine."""
    given = [f"--{flag}" for flag in MODE_FLAGS if getattr(settings, flag)]
    if given:
        return settings.with_notes(
            f"{path} is for Amazon SageMaker and is ignored, because {given[0]} launches on this machine."
        )
    own = ("mixed_precision", "enable_cpu_affinity", "debug", "dynamo_config", "num_machines")
    settings = settings.with_changes(settings_file=path, sagemaker=config)
    return _take_values(settings, {key: getattr(config, key) for key in own})
