"""Questions to the NVIDIA driver, answered by a fake `nvidia-smi` or nvidia-ml-py; and binding to cores near a GPU."""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state import hardware, numa, nvidia
from accel_state.numa import override_numa_affinity, parse_core_list, set_numa_affinity


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a `nvidia-smi` into the path that answers with one line per GPU."""

    def install(names: list[str], driver: str = "535.1.2", buses: list[str] | None = None) -> None:
        program = tmp_path / "nvidia-smi"
        buses = buses or [f"00000000:{index:02X}:00.0, GPU-{index}" for index in range(len(names))]
        program.write_text(
            "#!/bin/sh\ncase $1 in\n"
            + f"*=name) printf '%s\\n' {' '.join(repr(name) for name in names)};;\n"
            + f"*=driver_version) printf '%s\\n' {' '.join([driver] * len(names))};;\n"
            + "-L) cat instances;;\n"
            + f"*=pci.bus_id,uuid) printf '%s\\n' {' '.join(repr(bus) for bus in buses)};;\nesac\n"
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


def test_names_and_driver(smi: Any) -> None:
    smi(["NVIDIA H200", "NVIDIA L40"], "550.54.15")
    assert nvidia.get_gpu_info() == (["NVIDIA H200", "NVIDIA L40"], 2)
    assert nvidia.get_driver_version() == "550.54.15"


@pytest.mark.parametrize(
    ("names", "driver", "expected"),
    [
        (["NVIDIA GeForce RTX 4090"] * 2, "535.1.2", False),
        (["NVIDIA GeForce RTX 4090"] * 2, "550.40.07", True),
        (["NVIDIA GeForce RTX 4090"] * 2, "unreadable", True),
        (["NVIDIA GeForce RTX 4090"], "535.1.2", True),
        (["NVIDIA H200"] * 2, "535.1.2", True),
    ],
)
def test_consumer_cards_under_an_old_driver(smi: Any, names: list[str], driver: str, expected: bool) -> None:
    smi(names, driver)
    assert nvidia.check_cuda_p2p_ib_support() is expected


def test_without_a_driver_nothing_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert nvidia.check_cuda_p2p_ib_support()
    assert nvidia.gpu_bus_ids(through_library=False) == []
    assert nvidia.mig_parents() == {}


def test_transfers_that_do_not_work_are_switched_off_once(smi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(["NVIDIA GeForce RTX 4090"] * 2)
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    with pytest.warns(UserWarning, match="Set NCCL_P2P_DISABLE and NCCL_IB_DISABLE to 1"):
        nvidia.avoid_unsupported_transfers()
    assert (os.environ["NCCL_P2P_DISABLE"], os.environ["NCCL_IB_DISABLE"]) == ("1", "0")
    nvidia.avoid_unsupported_transfers()  # the user has had a say


@pytest.mark.parametrize(("capability", "expected"), [((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_8_bit_floats(capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    question = nvidia.check_cuda_fp8_capability.__wrapped__
    assert question() is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert question() is expected


# ---- cores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cores"), [("", set()), ("0\n", {0}), ("0-3,8", {0, 1, 2, 3, 8}), ("2-2,4-5", {2, 4, 5})]
)
def test_lists_of_cores(text: str, cores: set[int]) -> None:
    assert parse_core_list(text) == cores


@pytest.fixture
def machine(smi: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Two GPUs, on memory nodes 1 and 0 of two cores each; returns what this process was bound to."""
    smi(["NVIDIA H200"] * 2, buses=["00000000:3B:00.0, GPU-aa", "00000000:5E:00.0, GPU-bb"])
    for bus, node in (("0000:3b:00.0", 1), ("0000:5e:00.0", 0)):
        folder = tmp_path / "sys/bus/pci/devices" / bus
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    for node in (0, 1):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{2 * node}-{2 * node + 1}\n")
    bound: list[set[int]] = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(numa, "SYSFS", tmp_path / "sys")
    monkeypatch.setattr(hardware, "is_cuda_available", lambda: True)
    monkeypatch.setattr(numa, "is_pynvml_available", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(set(cores)))
    return bound


def test_a_process_keeps_to_the_cores_of_its_gpu(machine: list[set[int]], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        override_numa_affinity(0)
        override_numa_affinity(1, verbose=True)
    assert machine == [{2, 3}, {0, 1}]
    assert [record.message for record in caplog.records] == [
        "Local rank 1 is bound to CPU cores [0, 1]: its GPU 00000000:5E:00.0 belongs to memory node 0"
    ]


@pytest.mark.parametrize(
    ("visible", "local_rank"),
    [("1", 0), ("GPU-bb", 0), ("1,0", 0), ("GPU-bb,GPU-aa", 0), ("1", 3), ("GPU-bb", 3), ("MIG-b1", 3)],
)
def test_hidden_gpus_do_not_count_and_the_only_visible_one_is_that_of_any_local_rank(
    visible: str, local_rank: int, machine: list[set[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "instances").write_text(
        "GPU 0: NVIDIA H200 (UUID: GPU-aa)\n  MIG 1g.18gb     Device  0: (UUID: MIG-a0)\n"
        "GPU 1: NVIDIA H200 (UUID: GPU-bb)\n  MIG 1g.18gb     Device  0: (UUID: MIG-b0)\n"
        "  MIG 1g.18gb     Device  1: (UUID: MIG-b1)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    override_numa_affinity(local_rank)
    assert machine == [{0, 1}]


@pytest.mark.parametrize("visible", ["", "-1", "7,0"])
def test_no_gpu_no_binding(
    visible: str, machine: list[set[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    override_numa_affinity(0)
    assert machine == []
    assert f"the driver lists no GPU 0 for it: 0 are visible (CUDA_VISIBLE_DEVICES is {visible!r})." in caplog.text


NODE_OF_GPU, CORES_OF_NODE = "bus/pci/devices/0000:3b:00.0/numa_node", "devices/system/node/node1/cpulist"


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        (NODE_OF_GPU, "-1\n", r"this machine reports no memory node for its GPU .*3B:00.0 .*numa_node contains -1"),
        (NODE_OF_GPU, "nonsense", r"numa_node contains nonsense"),
        (NODE_OF_GPU, None, r"the memory node of its GPU .* is unknown: .*numa_node cannot be read \(No such file"),
        (CORES_OF_NODE, "\n", r"memory node 1, that of its GPU .*, has no cores"),
        (CORES_OF_NODE, "some", r"cpulist contains 'some', which is not a list of cores"),
        (
            CORES_OF_NODE,
            None,
            r"the cores of memory node 1, that of its GPU .*, are unknown: .*cpulist cannot be read",
        ),
        (
            CORES_OF_NODE,
            "8-9",
            r"memory node 1 with cores \[8, 9\], and this process may only use cores \[0, 1, 2, 3\]",
        ),
    ],
)
def test_why_nothing_is_bound_is_said(
    file: str, content: str | None, reason: str, machine: list[set[int]], caplog: pytest.LogCaptureFixture
) -> None:
    path = numa.SYSFS / file
    path.unlink() if content is None else path.write_text(content)
    with caplog.at_level(logging.INFO):
        override_numa_affinity(0)
    assert machine == []
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert re.search(f"^Local rank 0 is not bound to CPU cores: .*{reason}", record.message)


def test_other_ranks_say_so_only_when_asked(machine: list[set[int]], caplog: pytest.LogCaptureFixture) -> None:
    for bus in ("0000:3b:00.0", "0000:5e:00.0"):
        (numa.SYSFS / f"bus/pci/devices/{bus}/numa_node").write_text("-1")
    with caplog.at_level(logging.INFO):
        override_numa_affinity(1)
        assert not caplog.records
        override_numa_affinity(1, verbose=True)
    assert "Local rank 1 is not bound" in caplog.text
    assert machine == []


def test_what_the_system_forbids_stays_forbidden(
    machine: list[set[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    override_numa_affinity(0)
    assert machine == [{2}]

    def forbid(pid: int, cores: set[int]) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "sched_setaffinity", forbid)
    override_numa_affinity(0)
    assert "does not let this process choose cores [2] (Operation not permitted)" in caplog.text


def test_a_cpu_process_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    before = os.sched_getaffinity(0)
    with caplog.at_level(logging.INFO):
        override_numa_affinity(0)
    assert os.sched_getaffinity(0) == before
    assert "Local rank 0 is not bound to CPU cores: there is no NVIDIA GPU here." in caplog.text


def test_binding_happens_once(machine: list[set[int]]) -> None:
    set_numa_affinity.cache_clear()
    set_numa_affinity(0)
    set_numa_affinity(0)
    set_numa_affinity.cache_clear()
    assert machine == [{2, 3}]


@pytest.mark.parametrize(("works", "expected"), [(True, [("00000000:3B:00.0", "GPU-aa")]), (False, [])])
def test_the_library_is_asked_when_it_is_there(works: bool, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> None:
        if not works:
            raise library.NVMLError

    ended: list[bool] = []
    library = types.SimpleNamespace(
        NVMLError=type("NVMLError", (Exception,), {}),
        nvmlInit=start,
        nvmlShutdown=lambda: ended.append(True),
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetPciInfo=lambda handle: types.SimpleNamespace(busId=b"00000000:3B:00.0"),
        nvmlDeviceGetUUID=lambda handle: "GPU-aa",
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)  # type: ignore[arg-type]
    assert nvidia.gpu_bus_ids(through_library=True) == expected
    assert ended == [True] * works
