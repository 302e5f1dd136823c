"""What a check is, and what it finds around it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

# variable -> how the processes train when it is "true"; otherwise as their devices say
WAYS = {
    "ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED,
    "ACCELERATE_USE_FSDP": DistributedType.FSDP,
    "ACCELERATE_USE_MEGATRON_LM": DistributedType.MEGATRON_LM,
}


class SkippedError(Exception):
    """The check has no meaning here; the message says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the checks run.

    Attributes:
        rank: Of this process.
        world: Number of processes.
        kind: How they train, by the settings of the launch.
        folder: A folder that all processes see; None when there is none.
    """

    rank: int
    world: int
    kind: DistributedType
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must work.

    Attributes:
        area: What it belongs to.
        name: What it is, in a few words.
        run: Does it, on every process; raises when it does not work and `SkippedError` where it has no meaning.
    """

    area: str
    name: str
    run: Callable[[Place], None]


def checks(area: str, **functions: Callable[[Place], None]) -> tuple[Check, ...]:
    """Make rows of functions; underscores of their names become blanks."""
    return tuple(Check(area, name.replace("_", " "), function) for name, function in functions.items())


def make_accelerator(**settings: Any) -> Accelerator:
    """Make an accelerator as the first of a program: the settings of the launch count, as far as none are given."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(**settings)


def is_on(variable: str) -> bool:
    """Tell whether the launch has switched something on."""
    return os.environ.get(variable, "false").lower() == "true"


def way_of_training(state: PartialState) -> DistributedType:
    """Find out how the processes train, before anything is set up for it."""
    return next((kind for variable, kind in WAYS.items() if is_on(variable)), state.distributed_type)


def need_data_parallelism(place: Place) -> None:
    """Skip where processes do not each have a part of the data and the whole of the model."""
    if place.kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise SkippedError(f"{place.kind.value} trains one model in each program")
    if is_on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        raise SkippedError("processes share models as the parallelism settings say")


def same(found: Any, wanted: Any, what: str) -> None:
    """Compare two values, with both of them in the message.

    Raises:
        AssertionError: When they differ.
    """
    if found != wanted:
        raise AssertionError(f"{what}: expected {wanted!r}, got {found!r}")
