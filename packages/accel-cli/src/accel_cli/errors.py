"""Errors that the commands print without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(ValueError):
    """The command line, the config file or the environment is not valid.

    The program prints the message on one line and ends with a non-zero status.
    """


class MissingFileError(UsageError, FileNotFoundError):
    """A file that was named does not exist."""


class NotHereError(UsageError):
    """This machine lacks something that a launch needs, which another machine may have. A dry run only warns."""


class MissingHereError(MissingFileError, NotHereError):
    """A file that a launch needs is not on this machine."""


class ExistingFileError(UsageError, FileExistsError):
    """A file exists that would be overwritten."""


@contextmanager
def without_traceback() -> Iterator[None]:
    """Convert the errors of a public function to those that the command line prints."""
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
        word: The given name.
        known: The valid names.

    Returns:
        `" Did you mean 'train.py'?"`, or an empty `str` if no name is close.
    """
    from accel_state.guessing import closest

    close = closest(word, known)
    return f" Did you mean {close!r}?" if close else ""
