"""Checkpoints that a thread writes while training goes on.

One is written at a time. Its thread is no daemon: a program that ends, by itself or by an uncaught exception, ends only when
the checkpoint is complete or discarded. An error is raised where the run next has to do with checkpoints.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_state.logging import get_logger

logger = get_logger(__name__)


class BackgroundSave(os.PathLike[str]):
    """A checkpoint that is being written, from `save_state(..., async_save=True)`.

    It can be used as the path of its folder, which exists once the checkpoint is complete.

    Attributes:
        folder: The folder of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.error: BaseException | None = None
        self.is_seen = False
        self._is_written = threading.Event()

    def done(self) -> bool:
        """Whether it has ended: the checkpoint is complete, or has failed."""
        return self._is_written.is_set()

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete, and return its folder.

        Args:
            timeout (`float`, *optional*): Seconds to wait at most.

        Raises:
            TimeoutError: It is still being written.
            Exception: It could not be written, on this rank or on another one; nothing of it is left.
        """
        if not self._is_written.wait(timeout):
            raise TimeoutError(f"The checkpoint {self.folder} was not complete within {timeout:g} s.")
        self.is_seen = True
        if self.error is not None:
            raise self.error
        return self.folder

    def __fspath__(self) -> str:
        return os.fspath(self.folder)

    def __str__(self) -> str:
        return str(self.folder)

    def __truediv__(self, name: str | os.PathLike[str]) -> Path:
        return self.folder / name

    def __repr__(self) -> str:
        how = "being written" if not self.done() else "complete" if self.error is None else f"failed: {self.error!r}"
        return f"<BackgroundSave {str(self.folder)!r}, {how}>"

    def _run(self, work: Callable[[], None]) -> None:
        """Do the work in this thread, and keep its error."""
        try:
            work()
        except BaseException as error:
            error.add_note(f"The checkpoint {self.folder}, which save_state(async_save=True) had begun, is not there.")
            self.error = error
            logger.error(
                "The checkpoint %s could not be written: %s: %s", self.folder, type(error).__name__, error,
                main_process_only=False,
            )  # fmt: skip
        finally:
            self._is_written.set()


class BackgroundSaves:
    """The checkpoints that one accelerator has written in the background, of which the last may be unfinished."""

    def __init__(self) -> None:
        self._last: BackgroundSave | None = None

    def __reduce__(self) -> Any:
        return type(self), ()  # a pickled copy, in another process, writes nothing

    def start(self, folder: Path, work: Callable[[], None]) -> BackgroundSave:
        """Complete a checkpoint in a thread; the one before it must have ended.

        Args:
            folder: The folder of the checkpoint.
            work: Completes it, or raises and leaves nothing of it.
        """
        save = BackgroundSave(folder)
        threading.Thread(target=save._run, args=(work,), name="save_state", daemon=False).start()
        self._last = save
        _watch(save)
        return save

    def has_failed(self) -> bool:
        """Wait until the last one has ended; whether it has failed."""
        if self._last is None:
            return False
        self._last._is_written.wait()
        return self._last.error is not None

    def check(self) -> None:
        """Wait until the last one has ended.

        Raises:
            Exception: It failed, and nobody has seen the error.
        """
        if self.has_failed() and self._last is not None and not self._last.is_seen:
            self._last.result()


def finished_save(folder: Path) -> BackgroundSave:
    """What stands for a checkpoint that was written at once."""
    save = BackgroundSave(folder)
    save._is_written.set()
    return save


# ---- the end of the program -----------------------------------------------------------------------------------------

_watched: list[BackgroundSave] = []  # those that may have failed unseen
_registered_in: int | None = None  # a process id: forked processes inherit the list, but not the threads


def _watch(save: BackgroundSave) -> None:
    global _registered_in
    if _registered_in != os.getpid():
        if _registered_in is None:
            atexit.register(_report_unseen)
        _watched.clear()
        _registered_in = os.getpid()
    _watched[:] = [write for write in _watched if not write.done() or (write.error is not None and not write.is_seen)]
    _watched.append(save)


def _report_unseen() -> None:
    """Print errors that nothing has raised; the threads have ended before."""
    for save in _watched if os.getpid() == _registered_in else ():
        if save.error is not None and not save.is_seen:
            print(f"Exception in save_state({str(save.folder)!r}, async_save=True):", file=sys.stderr)  # noqa: T201
            traceback.print_exception(save.error, file=sys.stderr)
