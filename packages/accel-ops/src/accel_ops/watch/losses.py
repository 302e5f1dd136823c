"""Errors that only say that a connection was lost: a note says which rank has ended, and how."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from accel_ops.watch.notes import Note
from accel_state.supervision import SIGNS_OF_LOSS

WITHOUT_STORE = "Rank 0, whose process held the key-value store of the process group, has ended."
# torch's error names an argument of DistributedDataParallel, which programs do not call themselves here
UNUSED_PARAMETERS = "`find_unused_parameters=True`"
UNUSED_PARAMETERS_NOTE = (
    "  For a model whose forward pass leaves parameters out, write Accelerator(kwargs_handlers=["
    "DistributedDataParallelKwargs(find_unused_parameters=True)]), or freeze these parameters with requires_grad_(False) "
    "before prepare()."
)
SECONDS_TO_ASK = 1.0
SECONDS_TO_END = 5.0

_is_ending = threading.Event()


def stay_silent() -> None:
    """Print no error that follows from now on: the process is about to end with the reason."""
    _is_ending.set()


def sentence(gone: Mapping[int, Note]) -> str:
    """Say which ranks have ended, and where in the program; empty for none."""
    return " ".join(
        f"Rank {rank} {note.operation}{f' at {note.line}' if note.line and note.line[0] != '(' else ''}."
        for rank, note in sorted(gone.items())
    )


def rank_0_has_the_store() -> bool:
    """Whether the key-value store ends with the process of rank 0, rather than with the launcher."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") != "True"


def explain_errors(explain: Callable[[float], str]) -> None:
    """Have uncaught errors that follow from the end of another rank name it, and those of unused parameters the setting.

    Args:
        explain: Finds out which ranks have ended, within so many seconds.
    """
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _is_ending.is_set():
            time.sleep(SECONDS_TO_END)
        if any(sign in str(error) for sign in SIGNS_OF_LOSS) and (reason := explain(SECONDS_TO_ASK)):
            error.add_note(f"  {reason} Every rank must call a collective as often as the others.")
        if UNUSED_PARAMETERS in str(error):
            error.add_note(UNUSED_PARAMETERS_NOTE)
        previous(kind, error, trace)

    sys.excepthook = excepthook
