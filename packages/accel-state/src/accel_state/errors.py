"""Errors that callers may want to catch by type."""

from __future__ import annotations

from accel_state.public_names import known_as


@known_as("accelerate.utils.operations.DistributedOperationException")
class DistributedOperationException(Exception):  # noqa: N818 - the name is public interface
    """A collective was called with values, or as another collective, that do not match between ranks.

    Raised on every rank, before the collective can hang.
    """


class MissingLibraryError(ImportError):
    """An optional library that a feature needs is not installed."""


def missing_library(name: str, extra: str | None = None, why: str | None = None) -> MissingLibraryError:
    """Build the error for an optional library that is not installed.

    Args:
        name: The library as `pip install` knows it.
        extra: The extra of the `accelerate` distribution that installs it, where there is one.
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
