"""Runs training programs for real, or rehearses them, and writes what each step took: OUTPUT real|rehearsed CONFIGURATION ...

A configuration is what `rehearsed_script` takes, joined by commas, such as `llama,fsdp2,bf16`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections import Counter
from typing import Any

from accel_cli.rehearse.devices import DEVICES
from accel_cli.rehearse.rank import EndOfRehearsal, Settings, rehearse
from accel_cli.rehearse.recording import Recorder
from accel_state.accelerator_state import AcceleratorState
from accel_state.gradient_state import GradientState
from tests.cli import rehearsed_script

STEPS = int(os.environ.get("STEPS", 3))


def real_step(words: list[str]) -> dict[str, Any]:
    """The last step of a real run, recorded as a rehearsal is."""

    def end(step: Any) -> None:
        if len(recorder.steps) == STEPS:
            raise EndOfRehearsal

    recorder = Recorder(DEVICES["cpu"], end)
    try:
        with recorder:
            rehearsed_script.train(*words)
    except EndOfRehearsal:
        pass
    step = recorder.steps[-1]
    counts: Counter[tuple[str, int, int]] = Counter()
    for collective, count in step.collectives.items():
        counts[collective.name, len(collective.ranks), collective.num_bytes] += count
    return {"peak": sum(step.at_peak.values()), "collectives": sorted([*key, n] for key, n in counts.items())}


def rehearsed_step(words: list[str]) -> dict[str, Any]:
    """The last step of a rehearsal."""
    settings = Settings(world_size=int(os.environ["WORLD_SIZE"]), steps=STEPS)
    result = rehearse(lambda: rehearsed_script.train(*words), settings)
    counts: Counter[tuple[str, int, int]] = Counter()
    for exchange in result.exchanges:
        counts[exchange.name, exchange.num_ranks, exchange.num_bytes] += exchange.count
    return {"peak": sum(result.at_peak.values()), "collectives": sorted([*key, n] for key, n in counts.items())}


def main(output: str, kind: str, *configurations: str) -> None:
    """Write the last step of each configuration as JSON."""
    measure = {"real": real_step, "rehearsed": rehearsed_step}[kind]
    steps: dict[str, Any] = {}
    for configuration in configurations:
        try:
            steps[configuration] = measure(configuration.split(","))
        except Exception:
            steps[configuration] = traceback.format_exc()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        gc.collect()  # one program's tensors must not count for the next
    if os.environ["RANK"] == "0":
        with open(output, "w", encoding="utf-8") as file:
            json.dump(steps, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
