"""Mistakes that leave ranks waiting for each other end with all ranks named; right programs are left alone, however slow.

The programs are in `mistaken.py`. Those of one run are forked from one process, which pays the imports once.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import python
from tests.support.output import own_lines
from tests.support.short_run import values_of

PROGRAMS = Path(__file__).parent / "mistaken.py"
REASON = "deadlock. "

# what the rows of the ranks say, in the order of the ranks
NAMED = {
    "other_operation": ("all_reduce  float32[4]", "barrier"),
    "missing_call": ("gather (", "wait_for_everyone (barrier)"),
    "other_order": ("broadcast  float32[4]", "all_reduce  float32[4]"),
    "broadcast_that_one_rank_misses": ("broadcast  float32[4]", "all_reduce  float32[4]"),
    "shorter_loop_then_barrier": ("all_reduce in backward", "wait_for_everyone (barrier)"),
    "shorter_loop_then_gather": ("all_reduce in backward", "gather ("),
    "skipped_backward": ("all_reduce in backward", "gather ("),
    "caught_exception": ("gather (", "wait_for_everyone (barrier)"),
    "left_the_group": ("gather (", "has left the process group"),
    "recv_without_send": ("recv", "wait_for_everyone (barrier)"),
    "both_receive": ("recv",),
    "groups_in_other_order": ("all_reduce",),
    "asynchronous": ("wait", "wait_for_everyone (barrier)"),
    "reads_input": ("wait_for_everyone (barrier)", "reads standard input"),
}
# a rank ends early: the others lose their connection to it, or find out before
ENDING = {
    "shorter_loop_then_the_end": (1, "has ended"),
    "shorter_loop_on_rank_0": (0, "has ended"),
    "exits_early": (1, "has ended"),
    "rank_0_exits_early": (0, "has ended"),
    "exits_with_a_status": (1, "has ended"),
    "raises": (1, "raised ValueError"),
    "killed": (1, "died"),
    "dead_loader_worker": (1, "raised RuntimeError"),
}
RAISING = {"reduce_of_other_shapes": "rank 1: reduce(float32[7])"}
RIGHT = [
    "slow_sleep", "slow_computing", "slow_in_python", "slow_save_on_main", "slow_input_on_main", "slow_first", "slow_peers",
    "uneven_gathers_of_a_group", "groups_made_again", "ends_one_by_one", "forks_while_waiting", "stands_twice",
]  # fmt: skip
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MISTAKEN_PATIENCE": "100"}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the programs of all selected tests of this module did."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS), "--fork", *values_of(request, "name")],
        capture_output=True, text=True, check=True, env={**os.environ, **ENVIRONMENT}, timeout=900,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def said(outcome: dict[str, Any]) -> str:
    return "\n".join(own_lines("".join(outcome["err"].values())))


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"\d+(, \d+)*  ", line)]


@pytest.mark.sample(1)
@pytest.mark.launch
@pytest.mark.parametrize("name", NAMED)
def test_ranks_that_can_never_go_on_are_ended_by_name(name: str, outcomes: dict[str, Any]) -> None:
    outcome = outcomes[name]
    text = said(outcome)
    assert text.count(REASON) == 1, "once, for all ranks"
    table = rows(text)
    assert len(table) == len(NAMED[name])
    for row, operation in zip(table, NAMED[name], strict=True):
        assert operation in row
        assert re.search(rf"mistaken.py:\d+ in ({name}|train|<lambda>)", row), "the line of the program"
    assert "Traceback" not in text
    alive = {rank for rank, code in outcome["codes"].items() if code == 1}
    assert alive == {"0"} if name == "left_the_group" else {"0", "1"}, "nobody waits for the timeout"


@pytest.mark.sample(1)
@pytest.mark.launch
@pytest.mark.parametrize("name", ENDING)
def test_a_rank_that_ended_is_named_by_those_that_wait_for_it(name: str, outcomes: dict[str, Any]) -> None:
    ended, how = ENDING[name]
    other = str(1 - ended)
    text = outcomes[name]["err"][other]
    assert outcomes[name]["codes"][other] == 1
    assert re.search(rf"[Rr]ank {ended}\b.* {how}", text)
    assert "mistaken.py" in text


@pytest.mark.takes_turns
@pytest.mark.launch
@pytest.mark.parametrize("name", RAISING)
def test_mistakes_that_our_collectives_see_themselves(name: str, outcomes: dict[str, Any]) -> None:
    assert set(outcomes[name]["codes"].values()) == {1}
    assert all(RAISING[name] in text for text in outcomes[name]["err"].values())
    assert REASON not in said(outcomes[name])


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.launch
@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_left_alone(name: str, outcomes: dict[str, Any]) -> None:
    assert outcomes[name]["codes"] == {"0": 0, "1": 0}, said(outcomes[name])
    text = said(outcomes[name])
    assert text == "" or (
        name == "slow_save_on_main" and "save_state() was called on the main process without" in text
    )


# ---- through launchers ------------------------------------------------------------------------------------------

ACCELERATE = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    return python(*words, ACCELERATE_USE_CPU="true", **ENVIRONMENT)


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.launch
@pytest.mark.parametrize(
    "agent", [ACCELERATE, [*ACCELERATE, "--role", "trainer"], TORCHRUN], ids=["local", "agent", "torchrun"]
)
def test_the_reason_is_printed_once(agent: list[str]) -> None:
    done = launch(*agent, str(PROGRAMS), "other_operation")
    assert done.returncode == 1
    assert done.stderr.count(REASON) == 1
    assert len(rows(done.stderr)) == 2
    assert "most recent call last" not in done.stderr.partition(REASON)[0]


@pytest.mark.thorough
@pytest.mark.launch
def test_a_crash_in_compiled_code_names_the_line() -> None:
    done = launch(*ACCELERATE, str(PROGRAMS), "other_shape")
    assert done.returncode != 0
    assert re.search(r"was killed by SIGABRT.*in all_reduce at .*mistaken.py:\d+ in other_shape", done.stderr)
