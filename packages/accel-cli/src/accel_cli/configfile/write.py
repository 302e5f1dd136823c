"""Writing a config file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from accel_cli.configfile.location import default_json_config_file
from accel_cli.configfile.schema import BaseConfig, ClusterConfig
from accel_cli.configfile.values import write_json, write_yaml
from accel_cli.errors import UsageError
from accel_cli.launch.settings import PRECISIONS
from accel_state.enums import ComputeEnvironment, DistributedType


def write_config(path: str | os.PathLike[str], config: BaseConfig) -> None:
    """Write settings, as JSON if the name ends in `.json` and as YAML otherwise. Missing folders are created."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    (write_json if str(path).endswith(".json") else write_yaml)(path, config.to_dict())


def check_target(path: str | os.PathLike[str]) -> None:
    """Check that a file can be written, before the user answers questions for it.

    Args:
        path: The file. Its folder may be missing.

    Raises:
        ValueError: It is a folder, or its folder is not writable.
    """
    target = Path(path)
    if target.is_dir():
        raise UsageError(
            f"{str(target)!r} is a folder. Name a file in it, for example {str(target / 'config.yaml')!r}."
        )
    folder = next((parent for parent in target.absolute().parents if parent.exists()), Path("/"))
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"{str(target)!r} cannot be written: {str(folder)!r} is not a writable folder.")


def write_basic_config(
    mixed_precision: str = "no",
    save_location: str | os.PathLike[str] = default_json_config_file,
    *,
    format: Literal["json", "yaml"] = "json",
) -> Path | Literal[False]:
    """Write settings that use all accelerators of this machine, or its CPU when there are none.

    Args:
        mixed_precision: Precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`.
        save_location: The file to write, by default the default config file. Missing folders are created.
        format: JSON is YAML, too, and programs read the file of this function as JSON. `accelerate config default`
            uses YAML, which is easier to edit.

    Returns:
        The path, or False if the file already exists: it is not changed.

    Raises:
        ValueError: The precision is not valid.

    Example:
        ```python
        from accelerate.utils import write_basic_config

        write_basic_config(mixed_precision="bf16")
        ```
    """
    precision = str(mixed_precision).lower()
    if precision not in PRECISIONS:
        raise UsageError(f"mixed_precision must be one of {', '.join(PRECISIONS)}, got {mixed_precision!r}.")
    path = Path(save_location).expanduser()
    if path.exists():
        print(f"{path} already exists and was not changed. Name another file, or remove this one first.")
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    as_json = format == "json" or path.suffix == ".json"
    config = _this_machine(precision)
    (write_json if as_json else write_yaml)(path, config.to_dict())
    if config.use_cpu:
        _say_why_cpu(path)
    return path


def _say_why_cpu(path: Path) -> None:
    """Say that a file chooses the CPU although this machine has GPUs, which later launches would not mention."""
    from accel_state.nvidia import explain_missing_gpus

    missing = explain_missing_gpus()
    if missing is not None:
        print(
            f"{path} says use_cpu: true, because torch sees no GPU here: this machine has {missing.gpus}, but "
            f"{missing.reason}. {missing.advice}, and write the file again, or change it."
        )


def _this_machine(mixed_precision: str) -> ClusterConfig:
    """Settings for a launch on all accelerators of this machine."""
    from accel_state.devices import detect_device_kind

    kind = detect_device_kind()
    num_devices = 0 if kind.name == "cpu" else kind.device_count()
    several = num_devices > 1
    return ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=kind.distributed_type if several else DistributedType.NO,
        mixed_precision=mixed_precision,
        use_cpu=num_devices == 0,
        debug=False,
        num_processes=max(1, num_devices),
    )
