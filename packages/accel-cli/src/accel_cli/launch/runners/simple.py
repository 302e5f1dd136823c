"""One process."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NoReturn

from accel_cli.errors import UsageError
from accel_cli.launch.plan import Plan


def run(plan: Plan) -> int:
    """Run the script in a process of its own and wait.

    Returns:
        Its exit status; 128 plus the number of the signal that ended it.
    """
    try:
        with subprocess.Popen(plan.argv, env={**os.environ, **plan.environment}) as process:
            while True:
                try:
                    return exit_status(process.wait())
                except KeyboardInterrupt:  # the terminal interrupts the script, too: let it finish
                    continue
    except OSError as error:
        raise cannot_start(plan, error) from error


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
