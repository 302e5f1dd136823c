"""What a settings file says about a launch."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from accel_cli.configfile.location import default_config_path
from accel_cli.errors import did_you_mean, without_traceback
from accel_cli.launch.flags.table import OPTIONS
from accel_cli.launch.values import coerce, set_value

HARDWARE_FLAGS = ("cpu", "multi_gpu", "tpu")
MODE_FLAGS = (*HARDWARE_FLAGS, "use_deepspeed", "use_fsdp", "use_megatron_lm")

# distributed_type of a settings file -> the flag that says the same; every MULTI_<accelerator> is --multi_gpu
MODES = {"DEEPSPEED": "use_deepspeed", "FSDP": "use_fsdp", "MEGATRON_LM": "use_megatron_lm", "XLA": "tpu"}
MODES_ON_CPU = ("use_deepspeed", "use_fsdp")
ONE_PROCESS_TYPES = ("NO",)
CPU_TYPES = ("MULTI_CPU",)

# keys that are written under another name than the flag's
RENAMED_KEYS = {"tpu_vm": "vm", "tpu_env": "env"}
PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}


def take_file(settings: Namespace, environ: Mapping[str, str]) -> None:
    """Read the settings file that was named, or the default one if it exists and the command line lets it count.

    Args:
        settings: What is being resolved.
        environ: The environment variables, which say where the default file is.

    Raises:
        FileNotFoundError: When the file that was named does not exist.
        ValueError: When it says something that is not allowed.
    """
    path = settings.config_file
    if path is None:
        path = default_config_path(environ)
        if settings.cpu or not os.path.isfile(path):
            return
    from accel_cli.configfile.read import load_config_from_file
    from accel_cli.configfile.schema import ClusterConfig, SageMakerConfig

    with without_traceback():
        config = load_config_from_file(path)
    if isinstance(config, SageMakerConfig):
        _take_sagemaker(settings, config, path)
        return
    assert isinstance(config, ClusterConfig)
    settings.settings_file = path
    values = dict(config.__dict__)
    kind = values.pop("distributed_type").value
    values.pop("compute_environment")
    use_cpu = coerce(OPTIONS["cpu"], values.pop("use_cpu"), "use_cpu")
    if kind in ONE_PROCESS_TYPES:
        values["num_processes"] = 1
    settings.deepspeed_fields = _deepspeed_fields(config)
    _take_values(settings, values)
    _take_mode(settings, kind, use_cpu)


def _take_values(settings: Namespace, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        name = RENAMED_KEYS.get(key, key)
        if isinstance(value, dict):
            _take_section(settings, key, value)
        elif value is not None and name in OPTIONS:
            set_value(settings, name, coerce(OPTIONS[name], value, key), "file")


def _take_section(settings: Namespace, section: str, values: dict[str, Any]) -> None:
    prefix = PREFIXES.get(section, "")
    for key, value in values.items():
        name = key if str(key).startswith(prefix) else f"{prefix}{key}"
        if name in OPTIONS:
            if value is not None:
                set_value(settings, name, coerce(OPTIONS[name], value, f"{section}.{key}"), "file")
        else:
            from accel_cli.configfile.source import read_source

            where = read_source(settings.settings_file).at(f"{section}.{key}")
            hint = did_you_mean(name, list(OPTIONS))
            settings.notes.append(f"{where}: {section}.{key} means nothing here.{hint}")
    if section == "parallelism_config" and values:
        set_value(settings, "use_parallelism_config", True, "file")


def _take_mode(settings: Namespace, kind: str, use_cpu: bool) -> None:
    """Let the file choose hardware and way of training where the command line does not."""
    given = [flag for flag in MODE_FLAGS if getattr(settings, flag)]
    way = MODES.get(kind)
    if way and (not given or (given == ["cpu"] and way in MODES_ON_CPU)):
        set_value(settings, way, True, "file")
    elif not given and kind not in (*ONE_PROCESS_TYPES, *CPU_TYPES):
        set_value(settings, "multi_gpu", True, "file")
    if not any(flag in HARDWARE_FLAGS for flag in given):
        settings.use_cpu = use_cpu or kind in CPU_TYPES
        settings.sources["cpu"] = "file"


def _deepspeed_fields(config: Any) -> list[str]:
    """Name what the file says that a configuration of DeepSpeed's own would say, too."""
    fields = [str(key) for key in config.deepspeed_config]
    return [*fields, "mixed_precision"] if fields and config.mixed_precision else fields


def _take_sagemaker(settings: Namespace, config: Any, path: str) -> None:
    """Start the job at Amazon, unless the command line names hardware or a way of training for this machine."""
    given = [f"--{flag}" for flag in MODE_FLAGS if getattr(settings, flag)]
    if given:
        settings.notes.append(f"{path} is for Amazon SageMaker and does not count: {given[0]} starts on this machine.")
        return
    settings.settings_file = path
    settings.sagemaker = config
    own = ("mixed_precision", "enable_cpu_affinity", "debug", "dynamo_config", "num_machines")
    _take_values(settings, {key: getattr(config, key) for key in own})
