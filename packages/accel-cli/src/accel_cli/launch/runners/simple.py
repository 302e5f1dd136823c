"""Launches of a single command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from accel_cli.errors import UsageError
from accel_cli.launch.plan import Plan


def run(plan: Plan) -> int:
    """Run the command in a child process and wait. SIGTERM is forwarded to it.

    Returns:
        Its exit status; 128 plus the number of the signal that ended it.
    """
    try:
        with _end_requests() as ended, subprocess.Popen(plan.argv, env={**os.environ, **plan.environment}) as process:
            ended.append(process.terminate)
            while True:
                try:
                    return exit_status(process.wait())
                except KeyboardInterrupt:  # the terminal interrupts the script, too: let it finish
                    continue
    except OSError as error:
        raise cannot_start(plan, error) from error


class _EndRequests(list[Callable[[], None]]):
    """Callbacks for SIGTERM; those added after the signal are called at once."""

    came = False

    def __call__(self, number: int, frame: object) -> None:
        self.came = True
        for action in self:
            action()

    def append(self, action: Callable[[], None]) -> None:
        super().append(action)
        if self.came:
            action()


@contextmanager
def _end_requests() -> Iterator[_EndRequests]:
    """Handle SIGTERM, which would otherwise leave the child process running."""
    requests = _EndRequests()
    if threading.current_thread() is not threading.main_thread():  # where no signal arrives
        yield requests
        return
    before = signal.signal(signal.SIGTERM, requests)
    try:
        yield requests
    finally:
        signal.signal(signal.SIGTERM, before)


def become(plan: Plan) -> NoReturn:
    """Replace this process by the command (exec), which then has its exit status, signals and terminal."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "nt":  # where a new process would be started and this one would not wait
        sys.exit(run(plan))
    try:
        os.execvpe(plan.argv[0], plan.argv, {**os.environ, **plan.environment})
    except OSError as error:
        raise cannot_start(plan, error) from error


def cannot_start(plan: Plan, error: OSError) -> UsageError:
    """The error for a program that could not be started."""
    return UsageError(f"{plan.argv[0]!r} cannot be started: {error.strerror or error}.")


def exit_status(code: int) -> int:
    """Convert a `returncode` of `subprocess` to the exit status of a shell."""
    return 128 - code if code < 0 else code
