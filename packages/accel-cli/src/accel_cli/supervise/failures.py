"""What processes died of: the first error is told in full, those that follow from it in a line each."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

# what a process says that has lost another one
SIGNS_OF_LOSS = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "recvValue failed",
    "failed to recv", "Connection was likely closed", "NCCL communicator was aborted", "ncclRemoteError",
    "The client socket has failed to connect", "Application timeout caused pair closure", "Read timeout",
)  # fmt: skip
WORDS_OF_SIGNALS = {
    "SIGKILL": "the system ran out of memory, or somebody killed it",
    "SIGSEGV": "a fault in compiled code",
    "SIGBUS": "a fault in compiled code, or too little shared memory (/dev/shm)",
    "SIGABRT": "compiled code gave up; what it says stands above",
    "SIGTERM": "somebody asked it to end",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that ended a process.

    Attributes:
        rank: Of the process.
        seconds: When, as `time.time` counts.
        text: Its traceback.
    """

    rank: int
    seconds: float
    text: str

    @property
    def headline(self) -> str:
        """The line that says what is wrong."""
        lines = [line for line in self.text.strip().splitlines() if line and not line.startswith(" ")]
        return lines[-1] if lines else ""

    @property
    def follows_from_another(self) -> bool:
        """Whether it only says that another process is gone."""
        return any(sign in self.text for sign in SIGNS_OF_LOSS)


def read_failures(folder: str) -> list[Failure]:
    """Read what processes have left, the first error first."""
    found = []
    for name in os.listdir(folder):
        rank, _, kind = name.partition(".")
        if kind == "error" and rank.isdigit():
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                seconds, _, text = file.read().partition("\n")
            found.append(Failure(int(rank), float(seconds), text))
    return sorted(found, key=lambda failure: failure.seconds)


def describe_end(code: int) -> str:
    """Say how a process ended, from its return code as Python gives it."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"was ended by signal {-code}"
    why = WORDS_OF_SIGNALS.get(name)
    return f"was ended by {name}" + (f": {why}" if why else "")
