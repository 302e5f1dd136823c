"""Python stacks of this process, written whenever the launcher asks for them.

A signal handler can write them at any moment, but then it walks the frames of threads that run, and now and then crashes a
healthy process. So a thread waits for requests and writes while it holds the GIL, when no frame can change. Only where
compiled code keeps the GIL there is no answer; nothing else runs Python then, and the launcher sends the signal.
"""

from __future__ import annotations

import os
from contextlib import suppress

ASKS = "asks"
"""A file in the launcher's folder while it will ask, so that other processes have no thread more."""


def answer_requests(folder: str, rank: int, stacks: int) -> int | None:
    """Start the thread that writes the stacks, if the launcher is going to ask for them.

    Args:
        folder: The folder of the launcher.
        rank: The rank of this process.
        stacks: File descriptor that they are written to.

    Returns:
        The file descriptor that requests arrive at, to be kept open; None where the launcher does not ask.
    """
    if not os.path.exists(os.path.join(folder, ASKS)):
        return None
    import threading

    path = requests_of(folder, rank)
    with suppress(FileNotFoundError):  # of a process that this one replaces
        os.unlink(path)
    try:
        os.mkfifo(path, 0o600)
        requests = os.open(path, os.O_RDWR)  # its own writer, so that it does not end when the launcher closes its end
    except OSError:  # a file system without them: the signal is left
        return None
    name = "accelerate stacks"
    threading.Thread(target=_answer, args=(requests, stacks), name=name, daemon=True).start()
    return requests


def requests_of(folder: str, rank: int) -> str:
    """Path of the named pipe through which a process is asked."""
    return os.path.join(folder, f"{rank}.requests")


def _answer(requests: int, stacks: int) -> None:
    import faulthandler

    while os.read(requests, 4096):
        faulthandler.dump_traceback(stacks, all_threads=True)
