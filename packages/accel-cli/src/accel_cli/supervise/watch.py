"""Watching the processes of a launch: reports errors as they happen, and a run that hangs."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from accel_cli.supervise.failures import Failure, crash_line, describe_end, read_failures
from accel_cli.supervise.stacks import Stack, parse
from accel_state.process_ids import exists
from accel_state.stack_requests import ASKS, requests_of
from accel_state.supervision import HANG_TIMEOUT, MET, REPORT, STACK_SIGNAL, VARIABLE

PREFIX = "accelerate_watch_"
START_SECONDS = 60.0  # until a process must have reported
PATIENCE_SECONDS = 1.0  # how long to wait for an error that caused another one
SAMPLES = 4  # checks of each process within the hang timeout
MOST_UNANSWERED = 3  # checks without progress, after which a process does not answer because it cannot
ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/davinci", "/dev/neuron", "/dev/cambricon")
BUSY_FRACTION = 0.5  # of the time, from which on a process that runs or waits for a CPU core counts as computing


@dataclass(slots=True)
class _Process:
    """The last observations of a process."""

    count: int = 0
    busy_seconds: float = 0.0
    stack: Stack | None = None
    stacks_read: int = 0  # bytes of its file
    unanswered: int = 0  # checks in a row that found neither progress nor the stacks that were asked for
    was_signalled: bool = False  # whether the last request was the signal, which compiled code cannot hold up
    moved_at: float = field(default_factory=time.monotonic)


class Watch:
    """Watches the processes that one launcher has started on this machine.

    Args:
        hang_timeout: After how many seconds without progress in any process the run counts as hanging; None for
            never.
        quiet: Whether to print nothing.
        say: Prints a text; to standard error if left out.
    """

    def __init__(
        self, hang_timeout: float | None = None, quiet: bool = False, say: Callable[[str], None] | None = None
    ) -> None:
        self.hang_timeout = hang_timeout
        _remove_left_behind()
        self.folder = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}_")  # readable by this user only
        if hang_timeout is not None:
            open(os.path.join(self.folder, ASKS), "wb").close()
        self.is_hanging = False
        self._say = (lambda text: None) if quiet else say or _to_stderr
        self._told: dict[int, Failure] = {}
        self._past: set[tuple[int, float]] = set()  # rank and time of errors of processes that were restarted
        self._processes: dict[int, _Process] = {}
        self._ids: dict[int, int] = {}
        self._asked_at = self._began_at = time.monotonic()
        self._may_warn = True
        self._is_reported = False
        self.crash_lines: dict[int, str] = {}  # where processes were that compiled code crashed; after `close`

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of the processes."""
        timeout = {} if self.hang_timeout is None else {HANG_TIMEOUT: str(self.hang_timeout)}
        return {VARIABLE: f"{os.getpid()}:{self.folder}", **timeout}

    @property
    def crashed(self) -> frozenset[int]:
        """The ranks that have reported an exception; until `close`."""
        return frozenset(failure.rank for failure in self._failures())

    @property
    def victims(self) -> frozenset[int]:
        """The ranks whose exception only says that they have lost another one; until `close`."""
        return frozenset(failure.rank for failure in self._failures() if failure.follows_from_another)

    @property
    def process_ids(self) -> list[int]:
        """The processes that have reported."""
        return list(self.running.values())

    @property
    def has_met(self) -> bool:
        """Whether a process has joined the process group of all machines, called a collective, or taken a batch."""
        return os.path.exists(os.path.join(self.folder, MET)) or any(self._count(rank) for rank in self.running)

    def look(self, ended: dict[int, int] | None = None) -> None:
        """Check all processes once; called several times a second.

        Args:
            ended: Return codes of the processes that have ended, by rank.
        """
        self._note_restarts()
        self._tell_failures(ended or {}, final=False)
        if self.hang_timeout is not None and not self.is_hanging:
            self._look_for_progress(self.hang_timeout)

    def close(self, ended: dict[int, int] | None = None, tell: bool = True) -> None:
        """Print the errors that were not printed yet, unless `tell` is False, and remove the folder."""
        if tell:
            self._tell_failures(ended or {}, final=True)
        self.crash_lines = {rank: crash_line(self.folder, rank) for rank in ended or {}}
        shutil.rmtree(self.folder, ignore_errors=True)

    def begin_attempt(self, ended: dict[int, int]) -> None:
        """Print the errors of processes in whose place others have begun, and take later ones for those of the others.

        Args:
            ended: As in `look`, of the processes that are gone.
        """
        self._tell_failures(ended, final=True)
        self._past = {(failure.rank, failure.seconds) for failure in read_failures(self.folder)}
        self._told.clear()

    def _note_restarts(self) -> None:
        """Drop the observations of processes that were restarted."""
        ids = self.running
        restarted = [rank for rank, process_id in ids.items() if self._ids.get(rank, process_id) != process_id]
        for rank in restarted:
            self._told.pop(rank, None)
        if restarted:
            self._is_reported = False
            self._processes.clear()
        self._ids = ids

    def _failures(self) -> list[Failure]:
        return [failure for failure in read_failures(self.folder) if (failure.rank, failure.seconds) not in self._past]

    # ---- errors -------------------------------------------------------------------------------------------------

    def _tell_failures(self, ended: dict[int, int], final: bool) -> None:
        if self._tell_report():
            return
        waiting = [failure for failure in self._failures() if failure.rank not in self._told]
        killed = {rank: code for rank, code in ended.items() if code < 0 and rank not in self._told}
        if not self._told:
            # The first error in full is the one to read; errors about a lost connection mostly follow from another
            # rank.
            culprits = [failure for failure in waiting if not failure.follows_from_another]
            if culprits:
                self._tell_in_full(culprits[0])
            elif waiting and not killed and (final or time.time() - waiting[0].seconds > PATIENCE_SECONDS):
                self._tell_in_full(waiting[0])
            elif waiting and killed:  # the others have lost it
                rank, code = next(iter(killed.items()))
                self._announce(
                    f"accelerate launch: rank {rank} {describe_end(code)}{crash_line(self.folder, rank)}.\n"
                )
                self._told[rank] = Failure(rank, 0.0, "")
            else:
                return
        for failure in waiting:
            if failure.rank not in self._told:
                self._told[failure.rank] = failure
                where = f", at {failure.line}" if failure.line else ""
                self._say(f"accelerate launch: rank {failure.rank} ended after it{where}: {failure.headline}\n")

    def _tell_report(self) -> bool:
        """Print once why the ranks are deadlocked, if they proved it; the errors that follow say nothing more."""
        path = os.path.join(self.folder, REPORT)
        if not self._is_reported and os.path.exists(path):
            self._is_reported = True
            with open(path, encoding="utf-8") as file:
                self._announce(f"accelerate launch: deadlock. {file.read()}")
        return self._is_reported

    def _tell_in_full(self, failure: Failure) -> None:
        self._told[failure.rank] = failure
        why = ", because it lost another rank" if failure.follows_from_another else ""
        self._announce(f"accelerate launch: rank {failure.rank} failed{why}:\n{failure.text}")

    def _announce(self, text: str) -> None:
        """Print a report below what the program has printed: a progress bar leaves its line unfinished."""
        self._say(f"\n{text}")

    # ---- progress -----------------------------------------------------------------------------------------------

    def _look_for_progress(self, timeout: float) -> None:
        now = time.monotonic()
        interval = timeout / SAMPLES
        if now - self._asked_at < interval:
            return
        if not self._ids and self._may_warn and now - self._began_at > max(timeout, START_SECONDS):
            self._may_warn = False
            self._say(
                "accelerate launch: --hang_timeout has no effect, because no process reports its progress. The script "
                "must create an Accelerator or a PartialState, and must be started directly by this program.\n"
            )
        for rank, process_id in self._ids.items():
            process = self._processes.setdefault(rank, _Process())
            if self._has_moved(rank, process_id, process, now - self._asked_at):
                process.moved_at = now
        processes = self._processes.values()
        # All processes have to stand: one that computes may be what the others wait for.
        seems_to_hang = bool(processes) and all(now - process.moved_at > timeout for process in processes)
        if seems_to_hang and all(process.was_signalled or not process.unanswered for process in processes):
            self.is_hanging = True
            self._announce(self._report(timeout))
        for rank, process_id in self._ids.items():
            self._ask_for_stacks(rank, process_id, at_once=seems_to_hang)  # read at the next look
        self._asked_at = now

    @property
    def running(self) -> dict[int, int]:
        """The processes that have reported, by rank."""
        process_ids = {}
        for name in os.listdir(self.folder):
            rank, _, kind = name.partition(".")
            if kind == "pid" and rank.isdigit():
                with open(os.path.join(self.folder, name), encoding="ascii") as file:
                    process_ids[int(rank)] = int(file.read())
        return dict(sorted(process_ids.items()))

    def _has_moved(self, rank: int, process_id: int, process: _Process, seconds: float) -> bool:
        """Whether the counter or the stack of a process has changed, or it computes outside of torch.distributed."""
        count, busy_seconds, stack = self._count(rank), _busy_seconds(process_id), self._stack(rank, process)
        before = _Process(process.count, process.busy_seconds, process.stack)
        process.count, process.busy_seconds = count, busy_seconds
        process.stack = stack or process.stack
        # A process that neither counts nor answers may be held up in compiled code, which the signal interrupts.
        process.unanswered = process.unanswered + 1 if stack is None and count == before.count else 0
        if count != before.count or process.stack is None or before.stack is None:
            return True
        if stack is not None and stack.frames != before.stack.frames:
            return True
        computes = busy_seconds - before.busy_seconds > BUSY_FRACTION * seconds
        if not computes or process.stack.is_waiting:
            return False
        return count == 0 or not _holds_accelerator(process_id)

    def _count(self, rank: int) -> int:
        try:
            with open(os.path.join(self.folder, f"{rank}.count"), "rb") as file:
                return int.from_bytes(file.read(8), sys.byteorder)
        except OSError:
            return 0

    def _ask_for_stacks(self, rank: int, process_id: int, *, at_once: bool) -> None:
        """Request the stacks of a process: by its thread, or by the signal where compiled code keeps the GIL.

        Args:
            rank: Of the process.
            process_id: Of the process.
            at_once: Whether the first request without an answer is enough for the signal: the stack that is known is old.
        """
        process = self._processes[rank]
        process.was_signalled = process.unanswered > (0 if at_once else MOST_UNANSWERED)
        if process.was_signalled:
            _send_signal(process_id)
            return
        with suppress(OSError):  # it has no thread that reads requests, or has ended
            requests = os.open(requests_of(self.folder, rank), os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(requests, b"?")
            finally:
                os.close(requests)

    def _stack(self, rank: int, process: _Process) -> Stack | None:
        """The stack that the process wrote at the last request; None if it wrote none."""
        try:
            with open(os.path.join(self.folder, f"{rank}.stacks"), encoding="utf-8", errors="replace") as file:
                file.seek(process.stacks_read)
                text = file.read()
                process.stacks_read = file.tell()
        except OSError:
            return None
        return parse(text) if text.strip() else None

    def _report(self, timeout: float) -> str:
        rows = [("rank", "waits in", "at")]
        for rank, process in sorted(self._processes.items()):
            stack = process.stack
            rows.append((str(rank), (stack.collective if stack else "") or "-", stack.line if stack else "unknown"))
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{rank:{widths[0]}}  {operation:{widths[1]}}  {line}" for rank, operation, line in rows]
        stacks = [
            f"rank {rank}:\n{process.stack.text if process.stack else 'no stack'}"
            for rank, process in sorted(self._processes.items())
        ]
        return (
            f"accelerate launch: the run hangs: no process has made progress for {timeout:g} seconds. Their stacks:\n\n"
            + "\n".join(lines) + "\n\n" + "\n\n".join(stacks) + "\n\n"
            "accelerate launch: terminating them. Increase --hang_timeout if they only needed more time.\n"
        )  # fmt: skip


def _send_signal(process_id: int) -> None:
    """Request the stacks of a process by the signal, unless it has ended and its id belongs to another process now."""
    if _parent_of(process_id) in (os.getpid(), None):
        with suppress(ProcessLookupError):
            os.kill(process_id, STACK_SIGNAL)  # type: ignore[arg-type]


def _parent_of(process_id: int) -> int | None:
    """The parent of a process; None on systems without /proc."""
    if not os.path.isdir("/proc/self"):
        return None
    fields = _status(process_id)
    return int(fields[1]) if fields else 0


def _status(process_id: int) -> list[str]:
    """The fields of /proc/<id>/stat after the name; empty if there is no such process."""
    try:
        with open(f"/proc/{process_id}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _holds_accelerator(process_id: int) -> bool:
    """Whether a process has opened an accelerator: waiting for one looks like computing, because its driver spins."""
    folder = f"/proc/{process_id}/fd"
    with suppress(OSError):  # it has ended, or belongs to another user
        for name in os.listdir(folder):
            with suppress(OSError):
                if os.readlink(os.path.join(folder, name)).startswith(ACCELERATORS):
                    return True
    return False


def _remove_left_behind() -> None:
    """Remove the folders of launchers that were killed."""
    root = tempfile.gettempdir()
    for name in os.listdir(root):
        launcher = name.removeprefix(PREFIX).partition("_")[0]
        if not name.startswith(PREFIX) or not launcher.isdigit():
            continue
        if not exists(int(launcher)):
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)


def _busy_seconds(process_id: int) -> float:
    """The seconds that the threads of a process ran or waited for a CPU core; 0 on systems without /proc.

    The time in the queue counts: on a crowded machine a process that computes may get a core for a tenth of the time.
    """
    fields = _status(process_id)
    if not fields:
        return 0.0
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    with suppress(OSError):  # the process has just ended
        for thread in os.listdir(f"/proc/{process_id}/task"):
            seconds += _queued_seconds(f"/proc/{process_id}/task/{thread}/schedstat")
    return seconds


def _queued_seconds(schedstat: str) -> float:
    """The seconds that a thread was ready to run while others had the cores; 0 where Linux does not keep them."""
    try:
        with open(schedstat, encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, end="", flush=True)
