"""Running checks on all processes, with a new process group after one that failed."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from accelerate.state import PartialState
from accelerate.test_utils.scripts.checks.check import Check, Process, SkippedError, launched_type
from accelerate.utils import gather_object

OK, FAILED, SKIPPED = "ok", "failed", "skipped"

TIMEOUT = timedelta(seconds=60)  # of collectives
PATIENCE = timedelta(seconds=90)  # for the results of other ranks; longer, so that they can report a timeout


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a check.

    Attributes:
        check: The check.
        status: `"ok"`, `"failed"` or `"skipped"`.
        seconds: How long it took this process.
        said: By rank: the traceback of each process that failed, or the reason why it was skipped.
    """

    check: Check
    status: str
    seconds: float
    said: dict[int, str]


class Team:
    """The processes of this launch, which all-gather their results.

    They use the key-value store, since a failed check may have left the process group unusable.

    Args:
        state: Of this process.
    """

    def __init__(self, state: PartialState) -> None:
        self.rank, self.world, self.backend = state.process_index, state.num_processes, state.backend
        grouped = dist.is_available() and dist.is_initialized() and self.backend != "xla"
        self.store: Any = dist.distributed_c10d._get_default_store() if grouped else None
        self.rounds = 0
        self.rejoined = 0

    def exchange(self, status: str, text: str) -> dict[int, tuple[str, str]]:
        """All-gather the result of each process.

        Returns:
            Status and text by rank; a process without an answer has failed.
        """
        if self.world == 1:
            return {0: (status, text)}
        if self.store is None:
            return dict(enumerate(gather_object([(status, text)])))
        self.rounds += 1
        prefix = f"accelerate_test/{self.rounds}"
        self.store.set(f"{prefix}/{self.rank}", json.dumps([status, text]))
        return {rank: self._hear(f"{prefix}/{rank}") for rank in range(self.world)}

    def _hear(self, key: str) -> tuple[str, str]:
        try:
            self.store.wait([key], PATIENCE)
        except dist.DistError:
            return FAILED, f"no answer in {PATIENCE.seconds} seconds"
        status, text = json.loads(self.store.get(key))
        return status, text

    def rejoin(self) -> None:
        """Destroy the process group, in which collectives may be pending, and create another."""
        if self.store is None:
            return
        self.rejoined += 1
        dist.destroy_process_group()
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore(f"accelerate_test/group{self.rejoined}", self.store),
            rank=self.rank,
            world_size=self.world,
            timeout=TIMEOUT,
        )
        PartialState._reset_state()
        PartialState()


def run_checks(checks: Iterable[Check]) -> int:
    """Run checks one after the other, print a table, and return the exit status: 0 when none failed.

    Every process of the launch calls this with the same checks. The first one prints.
    """
    started = time.perf_counter()
    state = PartialState(timeout=TIMEOUT)
    team = Team(state)
    folder = _shared_folder(team)
    process = Process(team.rank, team.world, launched_type(state), folder)
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    about = f"{team.world} process{'es' if team.world > 1 else ''}, {process.kind.value}, {state.device.type}, "
    about += f"mixed precision {precision}"
    try:
        results = [run_check(check, process, team) for check in checks]
    finally:
        if folder is not None and team.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if team.rank == 0:
        sys.stdout.write(report(results, about, time.perf_counter() - started))
        sys.stdout.flush()
    state.wait_for_everyone()  # the store lives in the first process, which must not be the first to leave
    state.destroy_process_group()
    return 1 if any(result.status == FAILED for result in results) else 0


def run_check(check: Check, process: Process, team: Team) -> Result:
    """Run one check, and agree with the other processes on how it went."""
    started = time.perf_counter()
    status, text = OK, ""
    try:
        check.run(process)
    except SkippedError as reason:
        status, text = SKIPPED, str(reason)
    except Exception:
        status, text = FAILED, traceback.format_exc()
    seconds = time.perf_counter() - started
    heard = team.exchange(status, text)
    worst = next(word for word in (FAILED, SKIPPED, OK) if word in {status for status, _ in heard.values()})
    result = Result(check, worst, seconds, {rank: said for rank, (word, said) in heard.items() if word == worst})
    if worst == FAILED:
        if team.rank == 0:
            sys.stderr.write(complaint(result, team.world))
            sys.stderr.flush()
        team.rejoin()
    return result


def complaint(result: Result, world: int) -> str:
    """Say what failed on which process; those that say the same are named together."""
    ranks: dict[str, list[int]] = {}
    for rank, text in result.said.items():
        ranks.setdefault(text.rstrip(), []).append(rank)
    title = f"{result.check.area}, {result.check.name}: failed on rank"
    lines = [f"{title} {', '.join(map(str, who))} of {world}\n{text}\n\n" for text, who in ranks.items()]
    return "\n" + "".join(lines)


def report(results: list[Result], about: str, seconds: float) -> str:
    """Make the table of all checks."""
    rows = [("checked", "", "result", "seconds", "")]
    for result in results:
        why = next(iter(result.said.values()), "") if result.status == SKIPPED else ""
        rows.append((result.check.area, result.check.name, result.status, f"{result.seconds:.2f}", why))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{area:{widths[0]}}  {name:{widths[1]}}  {status:{widths[2]}}  {took:>{widths[3]}}  {why}".rstrip()
        for area, name, status, took, why in rows
    ]
    lines.insert(1, "-" * (sum(widths) + 6))
    counts = ", ".join(
        f"{sum(result.status == status for result in results)} {status}" for status in (OK, FAILED, SKIPPED)
    )
    return "\n".join([about, "", *lines, "", f"{counts} in {seconds:.1f} seconds", ""])


def _shared_folder(team: Team) -> str | None:
    """Make a folder that all processes see; None where the machines share no temporary folder."""
    folder = tempfile.mkdtemp(prefix="accelerate-test-") if team.rank == 0 else ""
    folder = team.exchange(OK, folder)[0][1]
    everywhere = all(text == "True" for _, text in team.exchange(OK, str(os.path.isdir(folder))).values())
    if not everywhere and team.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return folder if everywhere else None
