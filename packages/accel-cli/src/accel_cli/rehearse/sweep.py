"""Changes of the settings, each rehearsed and ranked."""

from __future__ import annotations

import copy
import os
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from accel_cli.errors import UsageError
from accel_cli.rehearse.devices import Device
from accel_cli.rehearse.result import RESERVE, Result
from accel_cli.rehearse.times import step_time

FSDP2 = {"use_fsdp": True, "fsdp_version": 2}


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One change.

    Attributes:
        title: What changes.
        flags: The flags of `accelerate launch` for it.
        peak_bytes: The peak of a rank.
        seconds: The time of a step.
        samples: Samples per second of all ranks.
        fits: Whether the peak fits the device.
        reason: Why it was not rehearsed; empty if it was.
    """

    title: str
    flags: str
    peak_bytes: int = 0
    seconds: float = 0.0
    samples: float = 0.0
    fits: bool = False
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def changes(world: int, machines: int, uses_deepspeed: bool = False) -> dict[str, dict[str, Any]]:
    """Title -> options of the launch, for the changes that a number of ranks allows; those of ZeRO for users of DeepSpeed."""
    per_machine = world // machines
    mesh: dict[str, Any] = {"use_parallelism_config": True, **FSDP2}
    rows: dict[str, dict[str, Any]] = {
        "DDP": {"use_fsdp": False, "use_parallelism_config": False},
        "FSDP 2": {"use_parallelism_config": False, **FSDP2},
        "FSDP 2, checkpointing": {"use_parallelism_config": False, **FSDP2, "fsdp_activation_checkpointing": True},
        "FSDP 2, offload": {"use_parallelism_config": False, **FSDP2, "fsdp_offload_params": True},
        "FSDP 2, no reshard after forward": {
            "use_parallelism_config": False,
            **FSDP2,
            "fsdp_reshard_after_forward": "false",
        },
    }
    if machines > 1 and per_machine > 1:
        rows["HSDP"] = {
            **mesh, "parallelism_config_dp_replicate_size": machines, "parallelism_config_dp_shard_size": per_machine,
        }  # fmt: skip
    if world % 4 == 0 and per_machine % 2 == 0:
        rows["TP 2, FSDP 2"] = {
            **mesh,
            "parallelism_config_tp_size": 2,
            "parallelism_config_dp_shard_size": world // 2,
        }
    rows = {title: {"use_deepspeed": False, **values} for title, values in rows.items()}
    if uses_deepspeed:
        rows |= {f"ZeRO {stage}": {"use_deepspeed": True, "zero_stage": stage} for stage in (1, 2, 3)}
    return rows


def sweep(args: Namespace, options: Any, device: Device, result: Result) -> list[SweepRow]:
    """Rehearse each change, as many at a time as this machine has cores.

    Args:
        args: The parsed arguments.
        options: Those of the command alone.
        device: The device of each rank.
        result: Of the settings as they are.

    Returns:
        The rows: those that fit by their samples per second, those that do not fit by their peaks, those that cannot be rehearsed.
    """
    from accel_cli.rehearse.cluster import RehearsalFailedError, rehearse, settle

    def rehearsed(title: str, values: dict[str, Any]) -> SweepRow:
        changed = copy.deepcopy(args)
        vars(changed).update(values, find_batch_size=False)
        changed.nondefault = {*getattr(args, "nondefault", ()), *values}
        launch_options = {name: value for name, value in values.items() if value is not False}
        flags = " ".join(
            f"--{name}" if value is True else f"--{name} {value}" for name, value in launch_options.items()
        )
        try:
            return _row(title, flags, rehearse(settle(changed, options), changed, is_quiet=True), device)
        except (UsageError, RehearsalFailedError) as error:
            return SweepRow(title, flags, reason=f"cannot be rehearsed: {' '.join(str(error).split())[:120]}")

    uses_deepspeed = bool(settle(args, options).use_deepspeed)
    with ThreadPoolExecutor(os.cpu_count()) as cores:
        tried = cores.map(
            lambda change: rehearsed(*change), changes(result.world_size, result.machines, uses_deepspeed).items()
        )
        rows = [_row("as it is", "", result, device), *tried]
    return sorted(rows, key=lambda row: (bool(row.reason), not row.fits, -row.samples if row.fits else row.peak_bytes))


def _row(title: str, flags: str, result: Result, device: Device) -> SweepRow:
    seconds = step_time(result, device).total
    samples = result.batch[0] * result.num_batches * result.data_ranks / seconds if result.batch and seconds else 0.0
    fits = not device.memory_bytes or result.peak_bytes <= device.memory_bytes * (1 - RESERVE)
    return SweepRow(title, flags, result.peak_bytes, seconds, samples, fits)
