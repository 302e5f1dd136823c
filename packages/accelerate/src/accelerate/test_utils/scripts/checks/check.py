"""Checks, and the facts about the launch that they use."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

# environment variable -> the engine when it is "true"; otherwise it depends on the devices
ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED,
    "ACCELERATE_USE_FSDP": DistributedType.FSDP,
    "ACCELERATE_USE_MEGATRON_LM": DistributedType.MEGATRON_LM,
}


class SkippedError(Exception):
    """The check does not apply to this launch; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Process:
    """This process, and the launch in which the checks run.

    Attributes:
        rank: Of this process.
        world: Number of processes.
        kind: The distributed type, by the settings of the launch.
        folder: A folder shared by all processes; None if there is none.
    """

    rank: int
    world: int
    kind: DistributedType
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        area: The group that it belongs to.
        name: A short description.
        run: Runs it on every process; raises if it fails, and `SkippedError` if it does not apply.
    """

    area: str
    name: str
    run: Callable[[Process], None]


def checks(area: str, **functions: Callable[[Process], None]) -> tuple[Check, ...]:
    """Make rows of functions; underscores of their names become blanks."""
    return tuple(Check(area, name.replace("_", " "), function) for name, function in functions.items())


def make_accelerator(**settings: Any) -> Accelerator:
    """Make an accelerator after resetting all states, so that the settings of the launch apply."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(**settings)


def is_on(variable: str) -> bool:
    """Whether an environment variable of the launch is true."""
    return os.environ.get(variable, "false").lower() == "true"


def launched_type(state: PartialState) -> DistributedType:
    """The distributed type that an accelerator of this launch will have."""
    return next((kind for variable, kind in ENGINES.items() if is_on(variable)), state.distributed_type)


def need_data_parallelism(process: Process) -> None:
    """Skip unless each process has a shard of the data and takes part in one model."""
    if process.kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise SkippedError(f"{process.kind.value} trains only one model in each program")
    if is_on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        raise SkippedError("models are parallelized by the ParallelismConfig")


def same(found: Any, wanted: Any, what: str) -> None:
    """Compare two values, with both of them in the message.

    Raises:
        AssertionError: They differ.
    """
    if found != wanted:
        raise AssertionError(f"{what}: expected {wanted!r}, got {found!r}")
