"""Errors that ended processes: the first one is printed in full, those that follow from it in a line each."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

# parts of messages of processes that have lost the connection to another one
SIGNS_OF_LOSS = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "recvValue failed",
    "failed to recv", "Connection was likely closed", "NCCL communicator was aborted", "ncclRemoteError",
    "The client socket has failed to connect", "Application timeout caused pair closure", "Read timeout",
)  # fmt: skip
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
    def follows_from_another(self) -> bool:
        """Whether it only reports a lost connection to another process."""
        return any(sign in self.text for sign in SIGNS_OF_LOSS)


def read_failures(folder: str) -> list[Failure]:
    """Read the errors that processes have written, in order of time."""
    found = []
    for name in os.listdir(folder):
        rank, _, kind = name.partition(".")
        if kind == "error" and rank.isdigit():
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                seconds, _, text = file.read().partition("\n")
            found.append(Failure(int(rank), float(seconds), text))
    return sorted(found, key=lambda failure: failure.seconds)


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
