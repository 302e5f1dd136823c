"""Models spread over four GPUs, the CPU and the disk: right values, on the devices asked for, without hidden waits.

The GPUs are those of the pretended driver: copies are torch's own, kernels are the CPU's.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda_shapes.driver import GpuMachine, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
GPUS = (0, 1, 2, 3)


def check(found: dict[str, Any]) -> dict[str, Any]:
    assert found.get("error") is None, found["error"]
    return found


@pytest.mark.parametrize("main", ["cuda:0", "cuda:3", "cpu"])
def test_four_gpus(machine: GpuMachine, main: str) -> None:
    found = check(machine.run("device_maps", "dispatched", GPUS, main))
    assert found["right"]
    assert found["devices"] == [f"cuda:{index}" for index in GPUS]
    if main != "cpu":
        assert found["waits"] == []


@pytest.mark.parametrize("places", [[0, "cpu"], [1, "cpu", "disk"], [0, 1, 2, 3, "cpu", "disk"]], ids=str)
def test_gpus_cpu_and_disk(machine: GpuMachine, places: list[Any]) -> None:
    found = check(machine.run("device_maps", "dispatched", tuple(places), "cuda:0"))
    assert found["right"]
    assert found["devices"] == sorted({"meta"} | {f"cuda:{one}" for one in places if isinstance(one, int)})


def test_an_inferred_map(machine: GpuMachine) -> None:
    found = check(machine.run("device_maps", "inferred"))
    assert found["right"]
    assert found["places"] == ["0", "1", "2", "3", "cpu"] or found["places"] == ["0", "1", "2", "3"]


def test_a_checkpoint_on_gpus_cpu_and_disk(machine: GpuMachine) -> None:
    found = check(machine.run("device_maps", "loaded", (1, 3, "cpu", "disk")))
    assert found["right"]
    assert found["devices"] == ["cuda:1", "cuda:3", "meta"]


def test_streamed_weights_reach_only_the_gpu_that_computes(machine: GpuMachine) -> None:
    found = check(machine.run("device_maps", "streamed"))
    assert found["right"]
    assert found["contexts"] == [3], "helper threads touched another GPU"
    assert found["waits"] == []
    assert "GB/s" in found["report"]


def test_reading_threads_use_the_gpu_of_their_process(machine: GpuMachine) -> None:
    found = check(machine.run("device_maps", "loaded_by_threads"))
    assert found["right"]
    assert found["devices"] == ["cuda:3"]
    assert found["contexts"] == [3]


def test_a_model_that_is_there_is_not_moved(machine: GpuMachine) -> None:
    assert check(machine.run("device_maps", "moved_to_the_current_gpu"))["moved"] == {}
