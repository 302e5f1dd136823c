"""Rehearsals against real runs of the same programs on gloo: peak of tensors, and the collectives of a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from accel_cli.rehearse.command import OLDEST_TORCH
from accel_cli.rehearse.devices import DEVICES
from accel_cli.rehearse.rank import EndOfRehearsal
from accel_cli.rehearse.recording import Recorder
from accel_state.libraries import is_installed, is_torch_version
from tests.cli import rehearsed_script
from tests.cli.rehearsed import forget, step_of
from tests.support.ranks import ranks

pytestmark = pytest.mark.skipif(
    not (is_installed("transformers") and is_torch_version(">=", OLDEST_TORCH)),
    reason=f"needs transformers, and torch {OLDEST_TORCH}",
)
ROOT = Path(__file__).resolve().parents[2]
ON_TWO = {
    "replicas and shards": ("llama,ddp", "gpt2,ddp,bf16", "llama,fsdp2,checkpointing", "gpt2,fsdp2", "llama,fsdp1"),
    "pictures": ("vit,ddp", "vit,fsdp2,bf16"),
    "parts of layers": ("llama,tp", "llama,cp", "llama,sp", "gpt2,fsdp1,checkpointing,bf16"),
    "stages": ("llama,pp", "gpt2,pp-1f1b,bf16", "llama,pp-interleaved"),
}
ON_FOUR = (
    "llama,hsdp",
    "gpt2,hsdp,checkpointing,bf16",
    "vit,hsdp",
    "llama,fsdp2-tp",
    "vit,fsdp2,checkpointing",
    "llama,fsdp2-pp",
)
# In the real run, what is sent lives until gloo's threads have sent it: the step with the least counts.
NEAR = {"llama,cp": 0.08, "llama,pp-interleaved": 0.05}
REAL_STEPS = 6


def rehearsed(folder: Path, world: int, configurations: tuple[str, ...], rank: int = 0) -> dict[str, Any]:
    output = folder / f"{rank}-of-{world}.json"
    environment = {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    words = [sys.executable, "-m", "tests.cli.rehearsed", str(output), *configurations]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    steps: dict[str, Any] = json.loads(output.read_text())
    return steps


def real(configuration: str) -> dict[str, Any]:
    def end(step: Any) -> None:
        if len(recorder.steps) == REAL_STEPS:
            raise EndOfRehearsal

    recorder = Recorder(DEVICES["cpu"], end)
    with suppress(EndOfRehearsal), recorder:  # an epoch of four ranks is over before
        rehearsed_script.train(*configuration.split(","))
    step = recorder.steps[-1]
    forget()
    least = min((step.at_peak for step in recorder.steps[2:]), key=lambda at_peak: sum(at_peak.values()))
    return step_of(least, [(c.name, len(c.ranks), c.num_bytes, n) for c, n in step.collectives.items()])


def compare(is_rehearsed: bool, rank: int, world: int, steps: dict[str, Any]) -> None:
    for configuration, expected in steps.items():
        step = real(configuration)
        if is_rehearsed:
            off = expected["peak"] / step["peak"] - 1
            counts = sum(row[-1] for row in step["collectives"])
            peaks = f"{step['peak']:,} | {expected['peak']:,} | {off:+.2%}"
            sys.stdout.write(
                f"| {world} | {rank} | `{configuration}` | {peaks} | {counts} |\n"
            )  # as in docs/rehearse.md
            assert step["collectives"] == [list(row) for row in expected["collectives"]], configuration
            assert abs(off) <= NEAR.get(configuration, 0.02), configuration


@pytest.fixture
def on_two(tmp_path: Path, group: str) -> dict[str, Any]:
    return rehearsed(tmp_path, 2, ON_TWO[group])


@pytest.fixture
def last_of_two(tmp_path: Path, group: str) -> dict[str, Any]:
    return rehearsed(tmp_path, 2, ON_TWO[group], rank=1) if group == "stages" else {}


@pytest.fixture
def on_four(tmp_path: Path) -> dict[str, Any]:
    return rehearsed(tmp_path, 4, ON_FOUR)


@pytest.mark.sample(1)
@ranks(2)
@pytest.mark.parametrize("group", list(ON_TWO))
def test_two_ranks_take_what_was_rehearsed(
    rank: int, world: int, group: str, on_two: dict[str, Any], last_of_two: dict[str, Any]
) -> None:
    compare(rank == 0, 0, world, on_two)
    compare(rank == 1, 1, world, last_of_two)


@pytest.mark.thorough
@ranks(4)
def test_four_ranks_take_what_was_rehearsed(rank: int, world: int, on_four: dict[str, Any]) -> None:
    compare(rank == 0, 0, world, on_four)
