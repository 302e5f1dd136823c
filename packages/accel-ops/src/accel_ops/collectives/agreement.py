"""Steps that all processes take together, and that fail on all of them when they fail on one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from accel_ops.files.durable import make_folder

Result = TypeVar("Result")


class RankInfo(Protocol):
    """The attributes of a state that say which process this is."""

    num_processes: int
    process_index: int
    local_process_index: int


class Ranks:
    """The processes of a run, as one of them sees them.

    Args:
        state: Says which process this is.
        gather: All-gathers one picklable value of every process, in the order of ranks; by default `gather_object`.
        alone: Whether this process continues without the others.

    Attributes:
        count: How many processes take part.
        absent: The ranks of the run that do not.
    """

    def __init__(
        self, state: RankInfo, gather: Callable[[Any], list[Any]] | None = None, *, alone: bool = False
    ) -> None:
        self.rank = state.process_index
        self.count = 1 if alone else state.num_processes
        self.absent = [rank for rank in range(state.num_processes) if alone and rank != self.rank]
        self.is_main = self.rank == 0
        self.local_rank = state.local_process_index
        self._gather = gather or _gather_objects

    def agreeing_by(self, gather: Callable[[Any], list[Any]]) -> Ranks:
        """The same processes, with another all-gather."""
        other = copy(self)
        other._gather = gather
        return other

    def all_gather(self, value: Result) -> list[Result]:
        """A picklable value of each process, in the order of ranks."""
        return [value] if self.count == 1 else self._gather(value)

    def together(self, doing: str, work: Callable[[], Result]) -> list[Result]:
        """Do something on every process, and continue only if it succeeded on all of them.

        Args:
            doing: What it is, to follow "could not".
            work: Calls no collectives, or the same ones on all processes.

        Returns:
            What `work` returned, by rank.

        Raises:
            Exception: That of this process, if its `work` raised.
            RuntimeError: If that of another process did; its error is quoted.
        """
        if self.count == 1:
            return [work()]
        result = self._attempt(doing, work)
        return self._agree(doing, None, result)

    def each(self, doing: str, work: Callable[[], Result]) -> Result:
        """The same, for a result that need not be picklable: each process gets its own."""
        if self.count == 1:
            return work()
        result = self._attempt(doing, work)
        self._agree(doing, None, None)
        return result

    def _attempt(self, doing: str, work: Callable[[], Result]) -> Result:
        """Do something, and let the others know when it fails."""
        try:
            return work()
        except Exception as error:
            self._agree(doing, f"{type(error).__name__}: {error}", None)
            raise

    def _agree(self, doing: str, problem: str | None, result: Any) -> list[Any]:
        """Exchange problems and results; raises where only others have a problem."""
        outcomes = self._gather((problem, result))
        failed = {rank: text for rank, (text, _) in enumerate(outcomes) if text is not None}
        if failed and problem is None:
            rank, text = next(iter(failed.items()))
            others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            raise RuntimeError(f"Process {rank}{others} could not {doing}: {text}")
        return [value for _, value in outcomes]

    def on_main(self, doing: str, work: Callable[[], Result]) -> Result:
        """The same, with `work` on process 0 only; every process gets its result."""
        results: list[Any] = self.together(doing, lambda: work() if self.is_main else None)
        return results[0]


@dataclass(frozen=True)
class Storage:
    """Who writes what, where machines may or may not share a file system.

    Attributes:
        owner: Rank of the process that creates, describes and publishes the folder that this process writes into.
        is_owner: Whether that is this process.
    """

    owner: int
    is_owner: bool

    def writes_shared(self, save_on_each_node: bool) -> bool:
        """Whether this process writes the replicated state: process 0, and on request one process of every machine.

        Machines that see the files of process 0 are left out, since they would write the same files again.
        """
        return self.is_owner and (self.owner == 0 or save_on_each_node)


def find_storage(ranks: Ranks, folder: Path) -> Storage:
    """Find out which processes see the files that process 0 writes beside `folder`, which need not exist.

    A process that does not see them writes into the folder of its machine's first process.
    """
    machines = ranks.all_gather(ranks.local_rank).count(0)
    if machines <= 1:
        return Storage(0, ranks.is_main)

    def leave_mark() -> Path:
        mark = make_folder(folder.parent) / f".{secrets.token_hex(4)}.seen"
        mark.touch()
        return mark

    mark = ranks.on_main(f"write beside {folder}", leave_mark)
    sees_it = ranks.together(f"look beside {folder}", lambda: mark.parent == folder.parent and mark.exists())
    if ranks.is_main:
        os.unlink(mark)
    owner = 0 if sees_it[ranks.rank] else ranks.rank - ranks.local_rank
    return Storage(owner, ranks.rank == owner)


def _gather_objects(value: Any) -> list[Any]:
    from accel_ops.collectives.objects import gather_object

    return gather_object([value])
