"""How figures of a GPU are taken: sizes, timing without work left on the device, paired rounds, the speed of the bus.

Nothing of these modules (`tools/bench/gpu_*.py`) imports anything of this library that accelerate 1.15 lacks, since the same
code measures both, each in processes of its own.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True)
class Figure:
    """One figure of one library: what a row of the table is made of.

    Attributes:
        key: Names the row, the same for both libraries.
        what: What was measured; that of this library's process is printed.
        unit: The unit of `value`, `floor` and `spread`.
        value: The figure.
        floor: The same work without any library.
        result: The number that `goal` bounds from above.
        goal: The bound.
        result_unit: "x" for a ratio, else a unit.
        spread: Half the interquartile range of `value`.
    """

    key: str
    what: str
    unit: str
    value: float
    floor: float | None
    result: float
    goal: float
    result_unit: str = "x"
    spread: float | None = None


@dataclass(frozen=True)
class Scale:
    """Where and how large everything is.

    Attributes:
        device: "cuda" or "cpu".
        tiny: Sizes at which the figures mean nothing, to try the code.
        is_ours: Whether the measured library is this one, and not accelerate 1.15.
    """

    device: str = "cuda"
    tiny: bool = False
    is_ours: bool = True

    def size(self, full: int, tiny: int) -> int:
        """One of two sizes."""
        return tiny if self.tiny else full

    @property
    def map_key(self) -> int | str:
        """The device as device maps name it."""
        return 0 if self.device == "cuda" else "cpu"

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any]) -> float:
        """How long it takes once, until nothing is left to do on the GPU."""
        self.synchronize()
        begin = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - begin

    def best(self, work: Callable[[], Any], repeats: int = 4) -> float:
        """The shortest of several runs."""
        return min(self.seconds(work) for _ in range(1 if self.tiny else repeats))


def by_turns(
    scale: Scale, sides: Mapping[str, Callable[[], Any]], steps: int, rounds: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Time several loops in rounds.

    Whoever runs first in a round may find the GPU's clock lower or the allocator's cache colder, so each round has another
    order: all permutations come equally often where `rounds` is a multiple of their number.

    Args:
        scale: Where.
        sides: One step of each loop.
        steps: How often it is called in a round.
        rounds: How many rounds count.
        warm_up: How many rounds before them do not.

    Returns:
        The seconds of a step, for each side one number a round.
    """
    orders = list(itertools.permutations(sides))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-warm_up, rounds):
        for name in orders[number % len(orders)]:
            step = sides[name]

            def block(step: Callable[[], Any] = step) -> None:
                for _ in range(steps):
                    step()

            taken = scale.seconds(block) / steps
            if number >= 0:
                times[name].append(taken)
    return times


def median_and_spread(values: list[float]) -> tuple[float, float]:
    """The median and half the interquartile range."""
    if len(values) < 2:
        return values[0], 0.0
    lower, _, upper = statistics.quantiles(values, n=4)
    return statistics.median(values), (upper - lower) / 2


def ratio(times: Mapping[str, list[float]], ours: str, floor: str) -> float:
    """How many times as long as the floor it takes: the median over the rounds."""
    return statistics.median(mine / raw for mine, raw in zip(times[ours], times[floor], strict=True))


@cache
def bus_speed(scale: Scale) -> float:
    """Bytes per second from pinned memory to the GPU, measured once in each process."""
    num_bytes = scale.size(1 << 30, 1 << 16)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=scale.device == "cuda")
    target = torch.empty(num_bytes, dtype=torch.uint8, device=scale.device)
    return num_bytes / scale.best(lambda: target.copy_(host, non_blocking=True))


def fresh_accelerator(scale: Scale, **options: Any) -> Any:
    """An accelerator that knows nothing of those before it."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=scale.device == "cpu", **options)
