"""What the commands say instead of a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(ValueError):
    """The command line, the configuration file or the environment asks for something that cannot be done.

    The program prints the message on one line and ends with a non-zero status.
    """


class MissingFileError(UsageError, FileNotFoundError):
    """A file that was named does not exist."""


class NotHereError(UsageError):
    """This machine lacks something that a launch needs; another machine may have it. A dry run only warns of it."""


class MissingHereError(MissingFileError, NotHereError):
    """A file that a launch needs is not on this machine."""


class ExistingFileError(UsageError, FileExistsError):
    """A file that would be replaced exists."""


@contextmanager
def without_traceback() -> Iterator[None]:
    """Turn the errors of a function that programs call, too, into those that the command line prints."""
    try:
        yield
    except UsageError:
        raise
    except FileNotFoundError as error:
        raise MissingFileError(str(error)) from error
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def did_you_mean(word: str, known: list[str]) -> str:
    """Build the hint that ends an error message about an unknown name.

    Args:
        word: What was given.
        known: The names that would have been right.

    Returns:
        `" Did you mean 'train.py'?"`, or an empty text when nothing is close.
    """
    from accel_state.guessing import closest

    close = closest(word, known)
    return f" Did you mean {close!r}?" if close else ""
