"""Errors that callers may want to catch by type."""

from __future__ import annotations

from accel_state.public_names import known_as


@known_as("accelerate.utils.operations.DistributedOperationException")
class DistributedOperationException(Exception):  # noqa: N818 - the name is public interface
    """A collective operation was about to run on values that differ between processes.

    Raised in debug mode (`ACCELERATE_DEBUG_MODE=1`), before the operation can hang.
    """


class MissingLibraryError(ImportError):
    """A feature was asked for whose optional library is not installed."""


def missing_library(name: str, extra: str | None = None, why: str | None = None) -> MissingLibraryError:
    """Build the error for an optional library that is not installed.

    Args:
        name: The library as `pip install` knows it.
        extra: The extra of the `accelerate` distribution that brings it, where there is one.
        why: What needs the library, as the beginning of a sentence: `"Logging to Weights & Biases"`.

    Returns:
        The error, for the caller to raise.

    Example:
        ```python
        if not is_wandb_available():
            raise missing_library("wandb", why="Logging to Weights & Biases")
        ```
    """
    target = f"'accelerate[{extra}]'" if extra else name
    subject = f"{why} needs the library" if why else "This needs the library"
    return MissingLibraryError(f"{subject} {name!r}, which is not installed. Run: pip install {target}", name=name)
