"""A process that computes on the CPU of a machine with GPUs says so, and why."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from accel_state import PartialState, nvidia, processes
from accel_state.devices import device_kind
from accel_state.nvidia import explain_missing_gpus, installed_gpus, invalid_gpu, shows_no_gpu
from tests.cuda_shapes.driver import missing, pretend

INFORMATION = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 77\nGPU UUID: \t {}\nBus Location: \t 0000:3b:00.0\n"
MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (user@host)\nGCC version: 13\n"
)
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Give this machine the files of NVIDIA GPUs; it has none of them before, and torch never sees one."""
    devices, driver = tmp_path / "dev", tmp_path / "driver"
    devices.mkdir()
    monkeypatch.setattr(nvidia, "DEVICE_FILES", devices)
    monkeypatch.setattr(nvidia, "DRIVER_FILES", driver)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(processes, "detect_device_kind", lambda: device_kind("cpu"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")

    def add(count: int, uuids: Sequence[str] = ()) -> None:
        (devices / "nvidia-caps").mkdir(mode=0o555)
        for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(count))):
            (devices / name).touch()
        for index, uuid in enumerate(uuids):
            folder = driver / f"gpus/0000:{index:02x}:00.0"
            folder.mkdir(parents=True)
            (folder / "information").write_text(INFORMATION.format(uuid))
        driver.mkdir(exist_ok=True)
        (driver / "version").write_text(MODULE)

    return add


def test_gpus_are_counted_by_their_files(install: Install) -> None:
    assert installed_gpus() == []
    install(2, ["GPU-aa11", "GPU-bb22"])
    assert installed_gpus() == ["GPU-aa11", "GPU-bb22"]


def test_nvidia_smi_decides_where_files_do_not_agree(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(1, ["GPU-aa11", "GPU-bb22"])
    assert installed_gpus() == [""], "which of them a container has is unknown without it"
    monkeypatch.setattr(nvidia.shutil, "which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr(nvidia, "_query", lambda field: ["00000000:01:00.0, GPU-bb22"])
    assert installed_gpus() == ["GPU-bb22"]


def test_a_container_that_sees_only_the_driver_has_no_gpu(install: Install) -> None:
    install(0, ["GPU-aa11"])
    assert installed_gpus() == []
    assert explain_missing_gpus() is None


GPUS = ["GPU-aa11", "GPU-bb22"]


@pytest.mark.parametrize(
    ("visible", "invalid", "shows_none"),
    [
        ("0", None, False),
        ("1,0", None, False),
        (" 0 , 1 ", None, False),
        ("GPU-aa11", None, False),
        ("GPU-b", None, False),
        ("MIG-1234", None, False),
        ("2", "2", True),
        ("0,7", "7", False),
        ("7,0", "7", True),
        ("0,0", "0", True),
        ("0,1,0", "0", True),
        ("GPU-cc", "GPU-cc", True),
        ("first", "first", True),
        ("0,-1,1", "-1", False),
        ("", "", True),
    ],
)
def test_what_cuda_makes_of_a_list(visible: str, invalid: str | None, shows_none: bool) -> None:
    assert invalid_gpu(visible, GPUS) == invalid
    assert shows_no_gpu(visible, GPUS) is shows_none
    assert invalid_gpu("GPU-cc", ["", ""]) is None, "UUIDs that cannot be compared count"


@pytest.mark.parametrize("visible", ["", "-1", "-1,0", "none", "NoDevFiles"])
def test_gpus_that_are_hidden_on_purpose(
    visible: str, install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with warnings.catch_warnings(), caplog.at_level(logging.INFO):
        warnings.simplefilter("error")
        PartialState()
    [record] = [record for record in caplog.records if record.name == "accelerate.state"]
    assert record.levelname == "INFO"
    assert record.message == (
        f"Computing on the CPU, although this machine has GPUs 0 to 7: CUDA_VISIBLE_DEVICES is {visible!r}, which hides all GPUs."
    )


def warned(reason: str) -> pytest.WarningsRecorder:
    return pytest.warns(
        UserWarning, match=f"^Computing on the CPU, although this machine has GPU 0: {reason}.*; to compute on"
    )


@pytest.mark.parametrize(
    ("visible", "fault"),
    [
        ("7", "names GPU '7', but this machine has only GPU 0"),
        ("1,0", "names GPU '1', but this machine has only GPU 0"),
        ("first,first", "names GPU 'first', but this machine has only GPU 0"),
        ("0,0", "names GPU '0' twice"),
    ],
)
def test_a_list_that_shows_no_gpu(visible: str, fault: str, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with warned(
        f"CUDA_VISIBLE_DEVICES is '{visible}', which {fault}. Set CUDA_VISIBLE_DEVICES to GPUs of this machine"
    ):
        PartialState()


def test_drivers_and_torches_that_do_not_fit(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(1)
    with warned(r"torch 2.13.0\+cu130 finds no usable GPU with driver 580.95.05. Update the driver, or install"):
        PartialState()
    PartialState._reset_state()
    (nvidia.DRIVER_FILES / "version").unlink()
    with warned(r"torch .* with driver of an unknown version"):
        PartialState()
    PartialState._reset_state()
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    with warned(r"torch 2.13.0\+cpu is built without CUDA. Install a torch for CUDA"):
        PartialState()


def test_files_that_may_not_be_opened(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(1)
    monkeypatch.setattr(os, "access", lambda path, mode: path.name not in ("nvidia0", "nvidia-caps"))
    with warned(r"this user may not open .*/nvidia0. Ask for the right to read and write it"):
        PartialState()


def test_who_asks_for_the_cpu_is_not_warned(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    PartialState(cpu=True)
    PartialState._reset_state()
    with monkeypatch.context() as changed:
        changed.setenv("ACCELERATE_USE_CPU", "true")
        PartialState()
    PartialState._reset_state()
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    PartialState()


def test_machines_without_gpus_are_quiet(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    PartialState()


PROGRAM = """
import os
from accel_state import PartialState
for visible in (None, "0", "", "7"):
    if os.fork() == 0:  # each process reads the variable once
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        print(visible, PartialState().device, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_program_on_a_machine_with_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=pretend(tmp_path, gpus=1), capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n") == ["None cuda", "0 cuda", " cpu", "7 cpu", ""]
    [line] = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert (
        "Computing on the CPU, although this machine has GPU 0: CUDA_VISIBLE_DEVICES is '7', which names GPU '7'"
        in line
    )
