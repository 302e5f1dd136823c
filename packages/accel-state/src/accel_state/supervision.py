"""What a process reports to the launcher that supervises it: progress, its Python stacks, and the error it exits with.

The launcher names a folder. Each process keeps a counter there, writes its Python stacks into a file when it is asked to
(`accel_state.stack_requests`; a signal where that cannot work), and writes the traceback of an uncaught exception, which the launcher prints once and first. Without such a
launcher, nothing of this happens.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

from accel_state.stack_requests import answer_requests

VARIABLE = "ACCELERATE_SUPERVISION"  # "<process id of the launcher>:<folder>"
HANG_TIMEOUT = "ACCELERATE_HANG_TIMEOUT"  # seconds without progress after which the launcher ends the run
# one that scripts do not use: SIGUSR1 and SIGUSR2 are theirs, to save a checkpoint when a scheduler sends them
STACK_SIGNAL: int | None = signal.SIGRTMIN + 12 if hasattr(signal, "SIGRTMIN") else getattr(signal, "SIGINFO", None)

MET = "ranks.met"
"""The file that says that a process of this machine has joined the process group: the run has begun on all machines."""

REPORT = "ranks.report"
"""The file that says why the ranks are deadlocked, which the launcher prints once."""

SIGNS_OF_LOSS = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "recvValue failed",
    "failed to recv", "Connection was likely closed", "NCCL communicator was aborted", "ncclRemoteError",
    "The client socket has failed to connect", "Application timeout caused pair closure", "Read timeout",
)  # fmt: skip
"""Parts of messages of processes that have lost the connection to another one."""

PR_SET_PDEATHSIG = 1

counter: Any = None
"""`counter[0]` is what the launcher reads; None without a launcher. `report_progress` adds to it."""

_kept: list[Any] = []  # open files, and what maps them


def report_to_launcher(rank: int) -> None:
    """Start reporting to the launcher, if there is one and it started this process itself.

    Args:
        rank: The rank of this process.
    """
    launcher, _, folder = os.environ.get(VARIABLE, "").partition(":")
    if _kept or STACK_SIGNAL is None or not folder or str(os.getppid()) != launcher:
        return
    if signal.getsignal(STACK_SIGNAL) != signal.SIG_DFL:  # the program uses it
        return
    try:
        _begin(rank, int(launcher), folder)
    except (OSError, ValueError):  # the launcher is about to end, and its folder gone; or this is not the main thread
        return
    if sys.excepthook is sys.__excepthook__:  # another hook is not replaced
        sys.excepthook = _leave_traceback(rank, int(launcher), folder)


def supervision_folder() -> str | None:
    """The folder through which this process reports to the launcher; None without such a launcher."""
    return os.environ[VARIABLE].partition(":")[2] if _kept else None


def report_met() -> None:
    """Tell the launcher that the process group of all ranks has been started.

    It is no progress yet: until its first collective or batch a process may compute on its accelerator for long.
    """
    if (folder := supervision_folder()) is not None:
        with suppress(OSError):  # the launcher is about to end, and its folder gone
            open(os.path.join(folder, MET), "wb").close()


def report_progress() -> None:
    """Count progress, so that a supervising launcher sees that the program does not hang.

    Called from everything that a training loop does repeatedly: collectives and barriers, batches, backward passes,
    optimizer steps, files read and written. It costs some 50 ns.
    """
    if counter is not None:
        counter[0] += 1


def _begin(rank: int, launcher: int, folder: str) -> None:
    import faulthandler
    import mmap

    global counter
    with open(os.path.join(folder, f"{rank}.count"), "w+b") as file:
        file.write(bytes(8))
        file.flush()
        pages = mmap.mmap(file.fileno(), 8)
    counter = memoryview(pages).cast("Q")
    stacks = open(os.path.join(folder, f"{rank}.stacks"), "wb", buffering=0)  # noqa: SIM115 - open as long as we live
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # type: ignore[arg-type] # what is left when faulthandler lets go at exit
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)  # type: ignore[arg-type]
    if not faulthandler.is_enabled():  # where a process is when compiled code aborts it
        crash = open(os.path.join(folder, f"{rank}.crash"), "wb", buffering=0)  # noqa: SIM115
        faulthandler.enable(file=crash, all_threads=True)
        _kept.append(crash)
    _kept.extend([pages, stacks, answer_requests(folder, rank, stacks.fileno())])
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no process survives a launcher that is killed
        if os.getppid() != launcher:  # just now
            os._exit(1)
    for name in (f"{rank}.error", REPORT):  # of a process that this one replaces
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))
    write_atomically(folder, f"{rank}.pid", str(os.getpid()))


def _leave_traceback(rank: int, launcher: int, folder: str) -> Any:
    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt) or os.getppid() != launcher:
            sys.__excepthook__(kind, error, trace)
            return
        import traceback

        text = "".join(traceback.format_exception(kind, error, trace))
        try:
            write_atomically(folder, f"{rank}.error", f"{time.time()}\n{text}")
        except OSError:
            sys.__excepthook__(kind, error, trace)

    return excepthook


def write_atomically(folder: str, name: str, text: str) -> None:
    """Write a file atomically, so that readers see all of it or nothing."""
    draft = os.path.join(folder, f".{name}")
    with open(draft, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    os.replace(draft, os.path.join(folder, name))
