"""A worker that is forked while a thread holds a lock of ours can take that lock."""

from __future__ import annotations

import os
import threading
from importlib import import_module

import pytest


@pytest.mark.skipif("not hasattr(os, 'register_at_fork')", reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("module", "name"), [("accel_ops.files.mapped", "_OPENING"), ("accel_bigmodel.streaming.pinned", "_lock")]
)
def test_a_lock_is_free_in_a_forked_process(module: str, name: str) -> None:
    owner = import_module(module)
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with getattr(owner, name):
            is_held.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if getattr(owner, name).acquire(blocking=False) else 1)
    may_end.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
