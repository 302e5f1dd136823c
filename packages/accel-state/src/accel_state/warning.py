"""Warnings that point at the program's line, however deep inside these packages they come up."""

from __future__ import annotations

import sys
import warnings

_PASSED_OVER = frozenset(
    {
        "accel_bigmodel", "accel_cli", "accel_data", "accel_integrations", "accel_ops", "accel_state", "accel_tracking",
        "accelerate", "contextlib", "functools", "torch",
    }
)  # fmt: skip
"""Top-level modules whose frames lie between the program and a warning: ours, and what calls us for the program."""


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line that is neither ours nor torch's.

    Args:
        message: What was seen, and what to do.
        category: The class of the warning.
    """
    frame, stacklevel = sys._getframe(1), 2
    while frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER:
        if frame.f_back is None:  # nothing but us, as in a thread of ours
            stacklevel = 2
            break
        frame, stacklevel = frame.f_back, stacklevel + 1
    warnings.warn(message, category, stacklevel=stacklevel)
