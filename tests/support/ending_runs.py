"""Programs that end with a checkpoint that is still being written.

Run as a program: `python -m tests.support.ending_runs FOLDER ENDING...`. Prints one JSON object: the exit code and the standard
error of each. They are forked from this one, which has imported torch already.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_ops.files import durable
from accelerate.checkpoint import transaction
from tests.support.keeping import make_kept


def begin(folder: Path) -> Any:
    """A checkpoint that is written only when the main thread has come to its end."""
    kept = make_kept()
    kept.fill(3.0)
    save = transaction.StagedWriter.save

    def late_save(*args: Any, **kwargs: Any) -> None:
        threading.main_thread().join()
        save(*args, **kwargs)

    transaction.StagedWriter.save = late_save  # type: ignore[method-assign]
    saving = kept.save_state(folder / "state", async_save=True)
    kept.fill(4.0)
    return saving


def full(*args: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def end(how: str, folder: Path) -> None:
    """The program."""
    if how == "fails and is told":
        durable.os.write = full  # type: ignore[assignment]
        with contextlib.suppress(OSError):
            make_kept().save_state(folder / "state", async_save=True).result()
        return
    if how == "fails":
        durable.DurableFile._append = full  # type: ignore[method-assign,assignment]
    begin(folder)
    if how == "raises":
        raise ValueError("the program is wrong")
    if how == "exits":
        sys.exit(3)


def fork(how: str, folder: Path) -> tuple[int, Callable[[], str]]:
    """Start one; returns its process id in this process and 0 in the new one."""
    errors = folder / f"{how}.stderr"
    process = os.fork()
    if process == 0:
        descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 2)
        (folder / how).mkdir()
    return process, errors.read_text


def main() -> None:
    folder, endings, actual = Path(sys.argv[1]), sys.argv[2:], {}
    make_kept().save_state(folder / "loads what torch loads late")
    gc.freeze()  # or each of them looks at all of torch when it ends
    for how in endings:
        process, errors = fork(how, folder)
        if process == 0:
            end(how, folder / how)
            return
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        actual[how] = {"code": code, "stderr": errors()}
    print(json.dumps(actual))  # noqa: T201


if __name__ == "__main__":
    main()
