"""Tests see no GPU, also on a machine that has one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accel_state.devices import DEVICE_KINDS
from tests.cuda_shapes.driver import ROOT, missing, pretend
from tests.support.hidden_devices import VARIABLES, hide_from, is_about_gpus, with_all_devices

needs_pretended_gpu = pytest.mark.skipif(missing() is not None, reason=str(missing()))
# Files of tests that failed on the first machine with a GPU, and are quick.
REPRESENTATIVE = (
    "tests/state/test_accelerator_state.py",
    "tests/state/test_devices.py",
    "tests/state/test_nvidia.py",
    "tests/state/test_processes.py",
    "tests/cli/test_launch_tpu.py",
    "tests/cli/test_notebook.py",
)


def test_the_variables_are_those_of_the_table() -> None:
    table = {kind.visible_devices_variable for kind in DEVICE_KINDS if kind.name != "xla"}
    assert set(VARIABLES) == table - {None}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["tests/gpu"], True),
        (["tests/gpu/test_one_gpu.py::test_collectives_by_nccl", "tests/gpu"], True),
        (["tests/gpu", "tests/state"], False),
        (["tests"], False),
        (["tests/gpus"], False),
        ([], False),
    ],
)
def test_only_runs_of_tests_of_gpus_see_them(
    names: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert is_about_gpus(names) is expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    hide_from(names)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("3" if expected else "")
    assert "CUDA_VISIBLE_DEVICES" not in with_all_devices(os.environ)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="no variable hides the GPU of a Mac")
def test_this_test_sees_none() -> None:
    assert not torch.accelerator.is_available()


@needs_pretended_gpu
@pytest.mark.thorough
def test_tests_pass_on_a_machine_with_one_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *REPRESENTATIVE]
    environment = pretend(tmp_path, gpus=1)
    counted = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
        env=environment,
        capture_output=True,
        check=True,
    )
    assert counted.stdout.strip() == b"1"
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
