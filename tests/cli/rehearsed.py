"""Rehearses training programs one after the other, and writes the last step of each: OUTPUT CONFIGURATION ...

A configuration is what `rehearsed_script` takes, joined by commas, such as `llama,fsdp2,bf16`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

from accel_cli.rehearse.rank import Settings, rehearse
from accel_state.accelerator_state import AcceleratorState
from accel_state.gradient_state import GradientState
from tests.cli import rehearsed_script

STEPS = 3


def step_of(at_peak: dict[str, int], collectives: Iterable[tuple[str, int, int, int]]) -> dict[str, Any]:
    """Plain data: the bytes of the peak; name, ranks, bytes and count of each kind of collective."""
    counts: Counter[tuple[str, int, int]] = Counter()
    for name, num_ranks, num_bytes, count in collectives:
        counts[name, num_ranks, num_bytes] += count
    return {"peak": sum(at_peak.values()), "collectives": sorted([*key, count] for key, count in counts.items())}


def forget() -> None:
    """Let the next program start as in a process of its own: the tensors of the last one must not count."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()


def main(output: str, *configurations: str) -> None:
    """Write the steps as JSON."""
    steps = {}
    for configuration in configurations:
        settings = Settings(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), steps=STEPS)
        result = rehearse(partial(rehearsed_script.train, *configuration.split(",")), settings)
        collectives = [(e.name, e.num_ranks, e.num_bytes, e.count) for e in result.exchanges]
        steps[configuration] = step_of(result.at_peak, collectives)
        forget()
    with open(output, "w", encoding="utf-8") as file:
        json.dump(steps, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
