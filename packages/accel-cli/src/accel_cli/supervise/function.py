"""A function that runs on several processes: the first of its errors is raised in the launching process."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from accel_cli.supervise.failures import describe_end, read_failures
from accel_state.supervision import write_atomically


class FunctionFailedError(ChildFailedError):
    """A function that was launched on several processes failed on one of them; the message has its traceback.

    Args:
        error: The error of torch's agent.
        text: The message to show instead.
    """

    def __init__(self, error: ChildFailedError, text: str) -> None:
        self._text = text
        super().__init__(error.name, error.failures)

    def format_msg(self, *_: Any, **__: Any) -> str:
        """The message, with the traceback of the process that failed first."""
        return self._text


@contextmanager
def showing_the_first_error(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Show the first error, and none of the messages of torch's agent.

    Args:
        function: The function that the processes run.

    Yields:
        The function to launch instead, within the block.

    Raises:
        FunctionFailedError: Instead of the `ChildFailedError` that ends the block.
    """
    folder = tempfile.mkdtemp(prefix="accelerate_function_")
    log = logging.getLogger("torch.distributed.elastic")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield _reporting(function, folder)
    except ChildFailedError as error:
        raise FunctionFailedError(error, _describe(error, folder)) from None
    finally:
        log.setLevel(level)
        shutil.rmtree(folder, ignore_errors=True)


def _reporting(function: Callable[..., Any], folder: str) -> Callable[..., Any]:
    """Wrap a function so that it writes its traceback into a folder when it raises."""

    @wraps(function)
    def reporting(*args: Any) -> Any:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork inherits the handler of torch's agent, which raises
        rank = os.environ.get("RANK", "0")
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, f"{rank}.error"))  # of the attempt before a restart
        try:
            return function(*args)
        except Exception as error:
            import traceback

            trace = error.__traceback__.tb_next if error.__traceback__ else None
            text = "".join(traceback.format_exception(type(error), error, trace))
            with suppress(OSError):
                write_atomically(folder, f"{rank}.error", f"{time.time()}\n{text}")
            raise

    return reporting


def _describe(error: ChildFailedError, folder: str) -> str:
    failures = read_failures(folder)
    culprits = [failure for failure in failures if not failure.follows_from_another] or failures
    killed = [(rank, failure.exitcode) for rank, failure in error.failures.items() if failure.exitcode < 0]
    if culprits and not (killed and culprits[0].follows_from_another):
        first = culprits[0]
        return f"rank {first.rank} failed, and the other processes were terminated.\n\n{first.text}"
    rank, code = killed[0] if killed else (error.get_first_failure()[0], 1)
    return f"rank {rank} {describe_end(code)}; the other processes were terminated."
