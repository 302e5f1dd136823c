"""Whether a process exists."""

from __future__ import annotations

import os
import subprocess
import sys

from accel_state.process_ids import exists


def test_processes_that_run_exist_and_those_that_ended_do_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert exists(child.pid)
        assert exists(os.getpid())
        assert child.stdin is not None
        child.stdin.close()
    assert not exists(child.pid)


def test_processes_of_other_users_exist() -> None:
    assert exists(1)
