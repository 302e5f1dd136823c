"""Warnings that point at the program's line, however deep inside these packages they come up."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_PASSED_OVER = frozenset(
    {
        "accel_bigmodel", "accel_cli", "accel_data", "accel_integrations", "accel_ops", "accel_state", "accel_tracking",
        "accelerate", "contextlib", "functools", "torch",
    }
)  # fmt: skip
"""Top-level modules whose frames are skipped: these packages, and modules that call them for the program."""


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line outside of these packages and torch.

    Args:
        message: What happened, and what to do.
        category: The class of the warning.
    """
    frame, stacklevel = sys._getframe(1), 2
    while frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER:
        if frame.f_back is None:  # no frame of the program, as in a thread of these packages
            stacklevel = 2
            break
        frame, stacklevel = frame.f_back, stacklevel + 1
    warnings.warn(message, category, stacklevel=stacklevel)


def program_frame() -> FrameType | None:
    """The innermost frame outside of these packages and torch; None in a thread of these packages."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER:
        frame = frame.f_back
    return frame
