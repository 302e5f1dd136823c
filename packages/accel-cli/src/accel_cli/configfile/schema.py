"""The keys of a config file, as dataclasses."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import Any, ClassVar, Self

from accel_cli.configfile.source import Source
from accel_cli.errors import did_you_mean
from accel_state.enums import ComputeEnvironment, DistributedType, SageMakerDistributedType
from accel_state.public_names import known_as


@known_as("accelerate.commands.config.config_args.BaseConfig")
@dataclass
class BaseConfig:
    """Settings that every kind of launch has.

    Args:
        compute_environment: Where processes run.
        distributed_type: The kind of hardware and engine.
        mixed_precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`; None if not set.
        use_cpu: Whether to train on the CPU.
        debug: Whether to compare shapes on all ranks before collectives.
    """

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType | SageMakerDistributedType
    mixed_precision: str
    use_cpu: bool
    debug: bool

    distributed_types: ClassVar[type[Enum]] = DistributedType
    section_names: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        self.compute_environment = _member(ComputeEnvironment, self.compute_environment, "compute_environment")
        self.distributed_type = _member(self.distributed_types, self.distributed_type, "distributed_type")
        for section in (*self.section_names, "dynamo_config"):
            if getattr(self, section, None) is None:
                setattr(self, section, {})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, without None and empty sections."""
        values = {key: value.value if isinstance(value, Enum) else value for key, value in self.__dict__.items()}
        return {key: value for key, value in values.items() if value is not None and value != {}}

    @staticmethod
    def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
        """Add defaults to the content of a file, and convert old spellings to today's.

        Args:
            config_dict: The content of a file; it is not changed.

        Raises:
            ValueError: There is no `distributed_type`.
        """
        values = {key: _UNQUOTED.get(key, value) if value is False else value for key, value in config_dict.items()}
        environment = values.setdefault("compute_environment", ComputeEnvironment.LOCAL_MACHINE)
        if "distributed_type" not in values:
            raise ValueError("`distributed_type` is missing. Add for example `distributed_type: 'NO'`.")
        alone = values["distributed_type"] in (DistributedType.NO, "NO")
        if alone and environment != ComputeEnvironment.AMAZON_SAGEMAKER:
            values.setdefault("num_processes", 1)
        half = values.pop("fp16", False)
        values.setdefault("mixed_precision", "fp16" if half else None)
        if "dynamo_backend" in values:
            backend = values.pop("dynamo_backend")
            values["dynamo_config"] = {} if str(backend).upper() == "NO" else {"dynamo_backend": backend}
        for switch in ("use_cpu", "debug", "enable_cpu_affinity"):
            values.setdefault(switch, False)
        return values

    @classmethod
    def from_values(cls, values: dict[str, Any], source: Source | str) -> Self:
        """Make settings from the content of a file.

        Args:
            values: The content of the file.
            source: The file, for error messages.

        Raises:
            ValueError: There are unknown keys, values that are not valid, or missing settings: all of them in one
                message.
        """
        from accel_cli.configfile.check import Check

        check = Check(values, source if isinstance(source, Source) else Source(source))
        check.sections(cls.section_names)
        values = check.up_to_date()
        try:
            values = cls.process_config(values)
        except ValueError as error:
            check.mistakes.append(f"{check.source}: {error}")
            values = cls.process_config({**values, "distributed_type": "NO"})
        foreign = check.keys(values, [field.name for field in fields(cls)])
        check.values(values)
        check.missing([row.name for row in fields(cls) if row.default is MISSING and row.name not in values])
        kinds: dict[str, type[Enum]] = {
            "compute_environment": ComputeEnvironment,
            "distributed_type": cls.distributed_types,
        }
        for key, kind in kinds.items():
            with check.naming(key):
                values[key] = _member(kind, values[key], key)
        check.finish()
        config = cls(**{key: value for key, value in values.items() if key not in foreign})
        for section in foreign:  # options of other packages: not fields, but written and read like them
            setattr(config, section, values[section])
        return config

    @classmethod
    def from_json_file(cls, json_file: str | None = None) -> Self:
        """Read a JSON file; the default file when none is named."""
        return cls._from_file(json_file, "json")

    @classmethod
    def from_yaml_file(cls, yaml_file: str | None = None) -> Self:
        """Read a YAML file; the default file when none is named."""
        return cls._from_file(yaml_file, "yaml")

    @classmethod
    def _from_file(cls, path: str | None, format: str) -> Self:
        from accel_cli.configfile.values import read_values

        values, source = read_values(path, format)
        return cls.from_values(values, source)

    def to_json_file(self, json_file: str) -> None:
        """Write the settings as JSON, with an atomic rename."""
        from accel_cli.configfile.values import write_json

        write_json(json_file, self.to_dict())

    def to_yaml_file(self, yaml_file: str) -> None:
        """Write the settings as YAML, with an atomic rename."""
        from accel_cli.configfile.values import write_yaml

        write_yaml(yaml_file, self.to_dict())


@known_as("accelerate.commands.config.config_args.ClusterConfig")
@dataclass
class ClusterConfig(BaseConfig):
    """Settings for launches on machines other than SageMaker.

    The sections (`fsdp_config`, ...) are dictionaries of launch options; the other fields are launch options, too.
    """

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] = None  # type: ignore[assignment]  # the field is public interface
    tpu_vm: list[str] = None  # type: ignore[assignment]
    tpu_env: list[str] = None  # type: ignore[assignment]
    dynamo_config: dict[str, Any] | None = None

    section_names: ClassVar[tuple[str, ...]] = (
        "fp8_config", "deepspeed_config", "fsdp_config", "parallelism_config", "megatron_lm_config", "mpirun_config",
        "dynamo_config",
    )  # fmt: skip


@known_as("accelerate.commands.config.config_args.SageMakerConfig")
@dataclass
class SageMakerConfig(BaseConfig):
    """Settings for jobs on Amazon SageMaker."""

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = "accelerate-sagemaker-1"
    pytorch_version: str = "1.10.2"
    transformers_version: str = "4.17.0"
    py_version: str = "py38"
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    enable_cpu_affinity: bool = False

    distributed_types: ClassVar[type[Enum]] = SageMakerDistributedType


# NO without quotes is false in YAML
_UNQUOTED = {"distributed_type": "NO", "mixed_precision": "no", "dynamo_backend": "NO"}


def _member(kind: type[Enum], word: Any, key: str) -> Any:
    if isinstance(word, kind):
        return word
    try:
        return kind(str(word).upper())
    except ValueError:
        known = [member.value for member in kind]
        hint = did_you_mean(str(word).upper(), known)
        raise ValueError(f"{key}: {word!r} is not one of {', '.join(known)}.{hint}") from None
