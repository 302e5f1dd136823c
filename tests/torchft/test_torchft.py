"""Accelerators in the replica groups of torchft: one is killed and comes back, and the other one goes on meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.ports import free_ports

pytestmark = [
    pytest.mark.launch,
    pytest.mark.thorough,
    pytest.mark.skipif(find_spec("torchft") is None, reason="needs torchft"),
]
GROUP = Path(__file__).parent / "group.py"


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """The environment of replica groups, with a lighthouse in which they meet."""
    (port,) = free_ports(1)
    program = Path(sys.executable).parent / "torchft_lighthouse"
    words = [program, "--bind", f"127.0.0.1:{port}", "--min_replicas", "1", "--join_timeout_ms", "1000"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as lighthouse:
        yield {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "OMP_NUM_THREADS": "1"}
        lighthouse.terminate()


def start(folder: Path, group: int, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    words = [sys.executable, str(GROUP), str(folder), str(group)]
    with open(folder / f"{group}.log", "w") as log:  # no pipe, which would be full before it is read
        return subprocess.Popen(words, env=environ, stdout=log, stderr=log)


def test_a_group_that_is_killed_comes_back_with_the_weights_of_the_other(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    goes_on, is_killed = start(tmp_path, 0, environ), start(tmp_path, 1, environ)
    assert is_killed.wait(timeout=120) == -9, (tmp_path / "1.log").read_text()
    comes_back = start(tmp_path, 1, environ)
    assert comes_back.wait(timeout=120) == 0, (tmp_path / "1.log").read_text()
    assert goes_on.wait(timeout=120) == 0, (tmp_path / "0.log").read_text()
    assert int((tmp_path / "last").read_text()) > int((tmp_path / "killed").read_text()), "it was not waited for"
    first, second = ((tmp_path / f"{group}.weights").read_text() for group in (0, 1))
    assert first == second, "the same step, and the same weights bit for bit"
