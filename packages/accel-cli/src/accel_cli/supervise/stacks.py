"""Python stacks of a process, as `faulthandler` writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass

FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
WAITING = re.compile(r"torch[/\\]distributed[/\\](?!elastic|run)")
LIBRARIES = re.compile(r"site-packages|dist-packages|[/\\]lib[/\\]python3|accel(erate|_[a-z]+)[/\\]|^<")
OURS = re.compile(r"[/\\](accelerate|accel_[a-z]+)[/\\]")
INNER_NAMES = ("wrapper", "verified", "chained")  # functions of decorators, which are not shown


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
        text: The output of `faulthandler`, with all other threads.
    """

    frames: tuple[Frame, ...]
    text: str

    @property
    def is_waiting(self) -> bool:
        """Whether it is inside a call of torch.distributed."""
        return any(WAITING.search(frame.file) for frame in self.frames)

    @property
    def collective(self) -> str:
        """The collective in which it waits: our name for it, and torch's; empty for none."""
        torchs = [frame.function for frame in self.frames if WAITING.search(frame.file)]
        torchs = [name for name in torchs if name not in INNER_NAMES]
        if not torchs:
            return ""
        ours = [frame.function for frame in self.frames if OURS.search(frame.file)]
        ours = [name for name in ours if name not in INNER_NAMES and not name.startswith(("_", "<"))]
        return f"{ours[-1]} ({torchs[-1]})" if ours and ours[-1] != torchs[-1] else torchs[-1]

    @property
    def place(self) -> str:
        """The innermost line of the user's program, or the innermost of all if there is none."""
        own = [frame for frame in self.frames if not LIBRARIES.search(frame.file)]
        return str(next(iter(own or self.frames), "nowhere in Python"))


def parse(text: str) -> Stack:
    """Parse the output of `faulthandler` for all threads of a process.

    The main thread is the last one.
    """
    blocks: list[list[Frame]] = []
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ", "Stack ")):
            blocks.append([])
        elif (found := FRAME.match(line)) and blocks:
            blocks[-1].append(Frame(found["file"], int(found["line"]), found["function"]))
    return Stack(tuple(blocks[-1]) if blocks else (), text.strip())
