"""One process."""

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
    """Run the script in a process of its own and wait. A request to end (SIGTERM) is passed on to it.

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
    """What to do when this process is asked to end; what is added after that is done at once."""

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
    """Catch requests to end, which would otherwise leave a running process behind."""
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
    """Run the script in the place of this process: its exit status, signals and terminal are then its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "nt":  # where a new process would be started and this one would not wait
        sys.exit(run(plan))
    try:
        os.execvpe(plan.argv[0], plan.argv, {**os.environ, **plan.environment})
    except OSError as error:
        raise cannot_start(plan, error) from error


def cannot_start(plan: Plan, error: OSError) -> UsageError:
    """Say that the program itself could not be started."""
    return UsageError(f"{plan.argv[0]!r} cannot be started: {error.strerror or error}.")


def exit_status(code: int) -> int:
    """Turn Python's return code of a process into the one a shell would see."""
    return 128 - code if code < 0 else code
