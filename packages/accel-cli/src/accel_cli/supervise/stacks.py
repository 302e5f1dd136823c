"""Python stacks of a process, as `faulthandler` writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from accel_state import stack_requests
from accel_state.stacks import IN_DISTRIBUTED, collective_of, line_of

THREAD = re.compile(r"^(?=Thread |Current thread |Stack )", re.MULTILINE)
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
WRITER = re.compile(rf'^  File ".*\b{Path(stack_requests.__file__).name}", line', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of a process's main thread, innermost frame first.

    Attributes:
        frames: The frames.
        text: The output of `faulthandler`, with all other threads but the one that wrote it.
    """

    frames: tuple[Frame, ...]
    text: str

    @property
    def is_waiting(self) -> bool:
        """Whether it is inside a call of torch.distributed."""
        return any(IN_DISTRIBUTED.search(frame.file) for frame in self.frames)

    @property
    def collective(self) -> str:
        """The collective in which it waits: our name for it, and torch's; empty for none."""
        return collective_of(self._lines)[0]

    @property
    def line(self) -> str:
        """The innermost line of the user's program, or the innermost of all if there is none."""
        return line_of(self._lines)

    @property
    def _lines(self) -> list[tuple[str, int, str]]:
        return [(frame.file, frame.line, frame.function) for frame in self.frames]


def parse(text: str) -> Stack:
    """Parse the output of `faulthandler` for all threads of a process.

    The main thread is the last one. The thread that wrote them is left out.
    """
    parts = (part.rstrip() for part in THREAD.split(text.strip()))
    threads = [part for part in parts if part and not WRITER.search(part)]
    last = threads[-1] if threads else ""
    frames = (Frame(found["file"], int(found["line"]), found["function"]) for found in FRAME.finditer(last))
    return Stack(tuple(frames), "\n\n".join(threads))
