"""Errors that ended processes: the first one is printed in full, those that follow from it in a line each."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass

from accel_cli.supervise.stacks import parse
from accel_state.stacks import line_of
from accel_state.supervision import SIGNS_OF_LOSS

FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)$', re.MULTILINE)

WORDS_OF_SIGNALS = {
    "SIGKILL": "the machine ran out of memory, or a user killed it",
    "SIGSEGV": "a segmentation fault in compiled code",
    "SIGBUS": "a fault in compiled code, or too little shared memory (/dev/shm)",
    "SIGABRT": "compiled code aborted; its message is above",
    "SIGTERM": "another program terminated it",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that ended a process.

    Attributes:
        rank: Rank of the process.
        seconds: When it was raised, as in `time.time`.
        text: Its traceback.
    """

    rank: int
    seconds: float
    text: str

    @property
    def headline(self) -> str:
        """The last line of the traceback, with the message."""
        lines = [line for line in self.text.strip().splitlines() if line and not line.startswith(" ")]
        return lines[-1] if lines else ""

    @property
    def line(self) -> str:
        """The innermost line of the user's program in the traceback; empty if there is none."""
        lines = [(found["file"], int(found["line"]), found["function"]) for found in FRAME.finditer(self.text)]
        return line_of(lines[::-1]) if lines else ""

    @property
    def follows_from_another(self) -> bool:
        """Whether it only reports a lost connection to another process."""
        return any(sign in self.text for sign in SIGNS_OF_LOSS)


def read_failures(folder: str) -> list[Failure]:
    """Read the errors that processes have written, in order of time."""
    failures = []
    for name in os.listdir(folder):
        rank, _, kind = name.partition(".")
        if kind == "error" and rank.isdigit():
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                seconds, _, text = file.read().partition("\n")
            failures.append(Failure(int(rank), float(seconds), text))
    return sorted(failures, key=lambda failure: failure.seconds)


def crash_line(folder: str, rank: int) -> str:
    """Where a process was when compiled code crashed it, as `" at file:line"`; empty if it is not known."""
    try:
        with open(os.path.join(folder, f"{rank}.crash"), encoding="utf-8", errors="replace") as file:
            stack = parse(file.read())
    except OSError:
        return ""
    return f", in {stack.collective or 'the program'} at {stack.line}" if stack.frames else ""


def describe_end(code: int) -> str:
    """Describe how a process ended, by its `returncode`."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"was killed by signal {-code}"
    why = WORDS_OF_SIGNALS.get(name)
    return f"was killed by {name}" + (f": {why}" if why else "")
