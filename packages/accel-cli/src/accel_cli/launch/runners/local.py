"""Several CPU processes of one machine, started directly, so that no agent has to load torch before them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from accel_cli.launch.machine import reserved_port
from accel_cli.launch.plan import Plan
from accel_cli.launch.runners.signals import ENDING, NOTICES, handled, status_after
from accel_cli.launch.runners.simple import cannot_start, exit_status
from accel_cli.supervise.failures import describe_end
from accel_cli.supervise.watch import Watch

TRIES = 3
LOOK_SECONDS = 0.1
INTERRUPT_SECONDS = 3.0
FAILURE_SECONDS = 30.0  # for the others once a process has failed
HUNG_STATUS = 124  # as in timeout(1)
PR_SET_PDEATHSIG = 1
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows ends processes in one way only


def run(plan: Plan) -> int:
    """Run the script in all processes and wait.

    Returns:
        0 if all of them succeeded, else the exit status of the one that failed first; 124 if they hung. After a signal,
        the result of `status_after`.
    """
    if not plan.port_may_change:
        return _Group(plan, plan.environment["MASTER_PORT"], may_try_again=False).run()
    for attempt in range(TRIES):
        with reserved_port() as port:  # another launch might listen on the default one before rank 0 does
            group = _Group(plan, str(port), may_try_again=attempt < TRIES - 1)
            status = group.run()
        if not group.lost_its_port:
            break
    return status


class _Group:
    """The processes of one attempt."""

    def __init__(self, plan: Plan, port: str, may_try_again: bool) -> None:
        self.plan = plan
        self.port = port
        self.may_try_again = may_try_again
        self.watch = Watch(plan.hang_timeout, plan.quiet)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ended: dict[int, int] = {}
        self.signal: int | None = None
        self.interrupted_at = float("inf")
        self.interrupt_passed_on = False
        self.lost_its_port = False

    def run(self) -> int:
        """Start all, wait, and end all when one fails."""
        handlers = dict.fromkeys(ENDING, self._forward) | dict.fromkeys(NOTICES, self._send)
        with handled({**handlers, "SIGINT": self._interrupt}):
            try:
                self._start()
                first = self._wait_for_a_failure()
            finally:
                codes = self._end()
                crashed = self.watch.crashed
                self.watch.close(self.ended, tell=not self.lost_its_port)
        if self.watch.is_hanging:
            return HUNG_STATUS
        if self.signal is not None:
            return status_after(self.signal, codes, crashed)
        return self._report(first) if first is not None else 0

    def _start(self) -> None:
        count = self.plan.num_workers
        common = {
            **os.environ, **self.plan.environment, **self.watch.variables, "MASTER_PORT": self.port,
            "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "ROLE_WORLD_SIZE": str(count),
            "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default",
            "TORCHELASTIC_RUN_ID": f"accelerate_{os.getpid()}", "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "False",
        }  # fmt: skip
        common.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        for rank in range(count):
            if self.signal is not None:  # it came before this process could get it
                return
            own = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
            try:
                process = subprocess.Popen(
                    self.plan.worker, env={**common, **own}, preexec_fn=killed_with(os.getpid())
                )
            except OSError as error:
                raise cannot_start(self.plan, error) from error
            self.processes.append(process)

    def _wait_for_a_failure(self) -> int | None:
        """The rank that failed first; None if all succeeded, or the run ends for another reason."""
        while len(self.ended) < len(self.processes):
            self._sleep()
            failed = [rank for rank in self._newly_ended() if self.ended[rank]]
            if self._must_try_again():
                return None
            if failed and self.interrupted_at < float("inf"):
                self.signal = signal.SIGINT  # the others are about to end as well
                return None
            if failed:
                return min(failed, key=lambda rank: self.ended[rank] > 0)  # one that was killed, before its victims
            self.watch.look(self.ended)
            self._pass_interrupt_on()
            if self.watch.is_hanging or self.signal is not None:
                return None
        return None

    def _sleep(self) -> None:
        """Wait until a process ends, or for a moment."""
        if not hasattr(os, "pidfd_open"):
            time.sleep(LOOK_SECONDS / 2)
            return
        poll = select.poll()
        handles = []
        for rank, process in enumerate(self.processes):
            if rank not in self.ended:
                try:
                    handles.append(os.pidfd_open(process.pid))
                except ProcessLookupError:
                    continue
                poll.register(handles[-1], select.POLLIN)
        try:
            poll.poll(LOOK_SECONDS * 1000)
        finally:
            for handle in handles:
                os.close(handle)

    def _newly_ended(self) -> list[int]:
        ranks = []
        for rank, process in enumerate(self.processes):
            if rank not in self.ended and (code := process.poll()) is not None:
                self.ended[rank] = code
                ranks.append(rank)
        return ranks

    def _interrupt(self, number: int) -> None:
        """A terminal interrupts all processes by itself. An interrupt of this process alone is forwarded later."""
        self.interrupted_at = min(self.interrupted_at, time.monotonic())

    def _pass_interrupt_on(self) -> None:
        """Interrupt the processes that a terminal would have interrupted by now."""
        if not self.interrupt_passed_on and time.monotonic() - self.interrupted_at > INTERRUPT_SECONDS:
            self.interrupt_passed_on = True
            self._forward(signal.SIGINT)

    def _forward(self, number: int) -> None:
        self.signal = number
        self._send(number)

    def _send(self, number: int) -> None:
        if number == signal.SIGINT and sys.platform == "win32":  # whose console interrupts them all
            return
        for rank, process in enumerate(self.processes):
            if rank not in self.ended:
                process.send_signal(number)

    def _end(self) -> dict[int, int]:
        """Terminate all processes that still run, and kill those that have not ended in time.

        Returns:
            How all processes ended, by rank.
        """
        failed_on_their_own = dict(self.ended)
        if self.signal is None:
            self._send(signal.SIGTERM)
        deadline = time.monotonic() + (FAILURE_SECONDS if self.signal is None else self.plan.shutdown_timeout)
        while len(self.ended) < len(self.processes) and time.monotonic() < deadline:
            self._sleep()
            self._newly_ended()
            self._pass_interrupt_on()
        self._send(KILL)
        codes = {rank: process.wait() for rank, process in enumerate(self.processes)}
        self.ended = failed_on_their_own  # the others were terminated
        return codes

    def _must_try_again(self) -> bool:
        """Whether rank 0 found its port taken; checked before its error is printed."""
        path = os.path.join(self.watch.folder, "0.error")
        if self.may_try_again and self.signal is None and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                self.lost_its_port = "EADDRINUSE" in file.read()
        return self.lost_its_port

    def _report(self, rank: int) -> int:
        """Print in one line which process failed first, below its own error."""
        code = self.ended[rank]
        if not self.plan.quiet:
            where = self.watch.crash_lines.get(rank, "")
            print(
                f"accelerate launch: process {rank} (pid {self.processes[rank].pid}) {describe_end(code)}{where}; the "
                "others were terminated.",
                file=sys.stderr,
            )
        return exit_status(code) or 1


def killed_with(launcher: int) -> Callable[[], None] | None:
    """A function that a new process calls first, so that it is killed when the launcher is."""
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl

    def in_new_process() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it has died already
            os._exit(1)

    return in_new_process
