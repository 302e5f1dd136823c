"""Where a thread of this process stands: its line in the user's program, and the collective that it is in."""

from __future__ import annotations

import linecache
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

IN_DISTRIBUTED = re.compile(r"torch[/\\]distributed[/\\](?!elastic|run)")
LIBRARIES = re.compile(r"site-packages|dist-packages|[/\\]lib[/\\]python3|accel(erate|_[a-z]+)[/\\]|^<")
OURS = re.compile(r"[/\\](accelerate|accel_[a-z]+)[/\\]")
INNER_NAMES = ("wrapper", "verified", "chained")  # functions of decorators, which are not shown

COLLECTIVES_FILE = re.compile(r"torch[/\\]distributed[/\\]distributed_c10d\.py$")
BACKWARD = "_engine_run_backward"
SENDER = {"recv": ("src", "group_src"), "send": ("dst", "group_dst")}  # parameters that name the other rank
DEEPEST = 400  # frames that are looked at

Line = tuple[str, int, str]
"""File, line number and name of the function."""


@dataclass(frozen=True, slots=True)
class StackPosition:
    """Where a thread stands.

    Attributes:
        line: The innermost line of the user's program.
        operation: The collective: our name for it, and torch's; empty outside of one.
        kind: `"collective"` or `"peer"` (a send or recv), which are waits for other ranks; `"backward"`, `"work"` (seems to
            wait for an asynchronous collective) or `"inside"` (of torch.distributed), which may be; or empty.
        group: Name of the process group of the collective; empty if it is not known.
        peer: The rank that a send or recv needs, among all ranks.
        data: dtype and shape of the collective's tensor; empty if there is none.
    """

    line: str
    operation: str = ""
    kind: str = ""
    group: str = ""
    peer: int | None = None
    data: str = ""


def current_frame(thread: int) -> FrameType | None:
    """The innermost frame of a thread. Whoever holds it for long keeps the tensors in it."""
    return sys._current_frames().get(thread)


def signature(thread: int) -> tuple[int, ...]:
    """Numbers that change when the thread goes on, except when it comes back to the same point."""
    frame = current_frame(thread)
    numbers: list[int] = []
    while frame is not None and len(numbers) < DEEPEST:
        numbers += (id(frame.f_code), frame.f_lasti)
        frame = frame.f_back
    return tuple(numbers)


def cpu_seconds(thread: int) -> float | None:
    """The seconds of CPU time that a thread has had; None on systems that do not say."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    except OSError:
        return None


def position(thread: int) -> StackPosition:
    """Where a thread stands now."""
    frame = current_frame(thread)
    lines = list(_lines(frame))
    operation, kind = collective_of(lines)
    line = line_of(lines)
    if not kind and lines and not LIBRARIES.search(lines[0][0]) and ".wait(" in linecache.getline(*lines[0][:2]):
        return StackPosition(line, "wait", "work")
    if kind != "collective":
        return StackPosition(line, operation, kind)
    while frame is not None and not (COLLECTIVES_FILE.search(frame.f_code.co_filename) and _takes_group(frame)):
        frame = frame.f_back
    if frame is None:
        return StackPosition(line, operation, "inside")
    values = frame.f_locals
    group, name = values.get("group"), frame.f_code.co_name
    is_peer = name in SENDER
    return StackPosition(
        line,
        operation,
        "peer" if is_peer else kind,
        _group_name(group),
        _peer(values, group, SENDER[name]) if is_peer else None,
        _describe(values),
    )


def collective_of(lines: Sequence[Line]) -> tuple[str, str]:
    """Name the collective that a stack is in.

    Args:
        lines: The stack, innermost frame first.

    Returns:
        The operation and the kind, as in `Position`.
    """
    torchs = [name for file, _, name in lines if IN_DISTRIBUTED.search(file) and name not in INNER_NAMES]
    ours = [name for file, _, name in lines if OURS.search(file) and LIBRARIES.search(file)]
    ours = [name for name in ours if name not in INNER_NAMES and not name.startswith(("_", "<"))]
    if any(name == BACKWARD for _, _, name in lines):
        return "backward", "backward"
    if not torchs:
        return "", ""
    return (f"{ours[-1]} ({torchs[-1]})" if ours and ours[-1] != torchs[-1] else torchs[-1]), "collective"


def line_of(lines: Sequence[Line], nowhere: str = "nowhere in Python") -> str:
    """The innermost line of the user's program in a stack, or the innermost of all if there is none."""
    own = [line for line in lines if not LIBRARIES.search(line[0])]
    for file, number, name in own or lines:
        return f"{file}:{number} in {name}"
    return nowhere


def program_line(thread: int) -> str:
    """The innermost line of the user's program where a thread stands; empty if it is in none."""
    return line_of([line for line in _lines(current_frame(thread)) if not LIBRARIES.search(line[0])], "")


def reads_standard_input(native_id: int) -> bool:
    """Whether a thread of this process waits for standard input, which is not a terminal; only Linux tells."""
    try:
        with open(f"/proc/self/task/{native_id}/syscall", encoding="ascii") as file:
            words = file.read().split()
        return len(words) > 2 and int(words[0]) in (0, 63) and int(words[1], 16) == 0 and not sys.__stdin__.isatty()  # type: ignore[union-attr]
    except (OSError, ValueError, AttributeError):
        return False


def _lines(frame: FrameType | None) -> Iterator[Line]:
    for _ in range(DEEPEST):
        if frame is None:
            return
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _takes_group(frame: FrameType) -> bool:
    code = frame.f_code
    return "group" in code.co_varnames[: code.co_argcount]


def _group_name(group: Any) -> str:
    import torch.distributed as dist

    group = dist.group.WORLD if group is None else group
    return str(getattr(group, "group_name", ""))


def _peer(values: dict[str, Any], group: Any, names: tuple[str, str]) -> int | None:
    import torch.distributed as dist

    of_all, of_group = (values.get(name) for name in names)
    if isinstance(of_all, int):
        return of_all
    if isinstance(of_group, int):
        whole: Any = dist.group.WORLD
        return dist.get_global_rank(whole if group is None else group, of_group)
    return None


def _describe(values: dict[str, Any]) -> str:
    import torch

    for name in ("tensor", "input_tensor", "input"):
        if isinstance(tensor := values.get(name), torch.Tensor):
            return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    return ""
