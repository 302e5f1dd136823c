"""Whether a process exists."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from accel_state.process_ids import exists, is_running, start_of


def test_processes_that_run_exist_and_those_that_ended_do_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert exists(child.pid)
        assert exists(os.getpid())
        assert child.stdin is not None
        child.stdin.close()
    assert not exists(child.pid)
    assert exists(1), "although it is another user's"


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="when a process began is read from /proc")
def test_a_running_process_is_told_from_a_later_one_with_its_id() -> None:
    started = start_of(os.getpid())
    assert started
    assert is_running(os.getpid(), started)
    assert not is_running(os.getpid(), started + 1)
    assert not is_running(2**30)
