"""A machine of our choice, and launches planned for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_cli.launch.command import launch_command_parser
from accel_cli.launch.flags.table import value_of
from accel_cli.launch.machine import Machine
from accel_cli.launch.plan import Plan, make_plan
from accel_cli.launch.resolve import from_namespace, resolve
from accel_cli.launch.settings import LaunchSettings
from accel_cli.launch.validate import check_flags, check_settings
from accel_state.nvidia import MissingGpus, describe_invalid, invalid_gpu

FREE_PORT = 40000


class Pretended(Machine):
    """Answers without looking."""

    def __init__(
        self,
        devices: int = 0,
        cores: int = 2,
        *,
        has_devices: bool = True,
        gpus: int = 0,
        missing: MissingGpus | None = None,
        usual_port_is_taken: bool = False,
        mpi: str = "",
        root: bool = False,
    ) -> None:
        self.some_devices, self.gpus, self.missing = has_devices, gpus, missing
        self.devices, self.cores, self.usual_port_is_taken = devices, cores, usual_port_is_taken
        self.mpi, self.root = mpi, root

    def num_devices(self) -> int:
        return self.devices

    def has_devices(self, gpu_ids: str = "") -> bool:
        return self.some_devices

    def fault_of_gpu_ids(self, gpu_ids: str) -> str:
        gpus = [""] * self.gpus
        return describe_invalid(gpu_ids, gpus) if gpus and invalid_gpu(gpu_ids, gpus) is not None else ""

    def missing_gpus(self, gpu_ids: str = "") -> MissingGpus | None:
        return self.missing

    def visible_devices_variable(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def num_cores(self) -> int:
        return self.cores

    def exists(self, path: str) -> bool:
        return False

    def is_root(self) -> bool:
        return self.root

    def mpi_version(self) -> str:
        return self.mpi

    def port(self, wanted: int | None, default: int = 29500) -> int:
        if wanted:
            return wanted
        return FREE_PORT if wanted == 0 or self.usual_port_is_taken else default


class Listed(Pretended):
    """Has a list of eight machines, wherever one looks."""

    def hosts(self, path: str) -> dict[str, int | None]:
        return {f"host{number}": None for number in range(8)}


def value_in(settings: LaunchSettings, name: str) -> Any:
    """The value of an option, whoever declares it."""
    return getattr(settings, name) if hasattr(settings, name) else value_of(settings, name)


def settings_of(
    *words: str, machine: Machine | None = None, environ: Mapping[str, str] | None = None
) -> LaunchSettings:
    """Parse and complete; the last word is the script."""
    args = launch_command_parser().parse_args(list(words))
    return resolve(args, {"HF_HOME": "/nowhere"} | dict(environ or {}), machine or Pretended())


def settled(
    *words: str, machine: Machine | None = None, environ: Mapping[str, str] | None = None
) -> tuple[LaunchSettings, Plan]:
    """Parse, check, complete and plan, as the command does."""
    environ = {"HF_HOME": "/nowhere"} | dict(environ or {})
    args = launch_command_parser().parse_args(list(words))
    check_flags(from_namespace(args))
    settings = resolve(args, environ, machine or Pretended())
    settings = settings.with_notes(*check_settings(settings))
    return settings, make_plan(settings, environ)


def plan_of(*words: str, machine: Machine | None = None, environ: Mapping[str, str] | None = None) -> Plan:
    """Parse, check, complete and plan, as the command does."""
    return settled(*words, machine=machine, environ=environ)[1]
