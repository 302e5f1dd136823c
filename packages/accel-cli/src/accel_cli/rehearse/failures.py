"""Why a script cannot be rehearsed, in one sentence."""

from __future__ import annotations

import os
import traceback

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
NEED_VALUES = (
    ".tolist() is not supported",
    ".numpy() is not supported",
    "Cannot convert",
    "data is not allocated yet",
    "GuardOnDataDependent",
)


class NotRehearsedError(ValueError):
    """A rehearsal cannot know what the script needs."""


def explained(error: Exception, script: str) -> str | None:
    """The reason why a script cannot be rehearsed; None for an error of its own.

    Args:
        error: What it raised.
        script: Its path.
    """
    text = " ".join(str(error).split())
    if isinstance(error, NotRehearsedError):
        return text
    line = _script_line(error, script)
    if isinstance(error, UnsupportedOperatorException):
        return (
            f"{line}: the operation {error.func} has no meta kernel, which computes shapes alone. Add --values to rehearse with real "
            "tensors, with a model that fits into this machine's memory."
        )
    if isinstance(error, NEEDS_VALUES) or any(words in text for words in NEED_VALUES):
        operation = getattr(error, "func", None) or text[:120]
        return (
            f"{line} needs the values of a tensor, and a rehearsal has shapes alone ({operation}). Add --values to rehearse with real "
            "tensors, with a model that fits into this machine's memory."
        )
    return None


def _script_line(error: Exception, script: str) -> str:
    """The last line of the script before the error."""
    path = os.path.abspath(script)
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if os.path.abspath(frame.filename) == path
    ]
    return f"{script}:{lines[-1]}" if lines else script
