"""Models spread over four GPUs, the CPU and the disk: right values, on the devices asked for, without hidden waits.

The GPUs are those of the pretended driver: copies are torch's own, kernels are the CPU's.
"""

from __future__ import annotations

from typing import Any

import pytest

from accel_bigmodel.weights.placing import NUM_GPU_READERS
from tests.cuda_shapes.driver import GpuMachine, missing
from tests.gpu import test_gpu_streaming

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
GPUS = (0, 1, 2, 3)


def check(actual: dict[str, Any]) -> dict[str, Any]:
    assert actual.get("error") is None, actual["error"]
    return actual


@pytest.mark.parametrize("main", ["cuda:0", "cuda:3", "cpu"])
def test_four_gpus(machine: GpuMachine, main: str) -> None:
    actual = check(machine.run("device_maps", "dispatched", GPUS, main))
    assert actual["right"]
    assert actual["devices"] == [f"cuda:{index}" for index in GPUS]
    if main != "cpu":
        assert actual["waits"] == []


@pytest.mark.parametrize("places", [[0, "cpu"], [1, "cpu", "disk"], [0, 1, 2, 3, "cpu", "disk"]], ids=str)
def test_gpus_cpu_and_disk(machine: GpuMachine, places: list[Any]) -> None:
    actual = check(machine.run("device_maps", "dispatched", tuple(places), "cuda:0"))
    assert actual["right"]
    assert actual["devices"] == sorted({"meta"} | {f"cuda:{one}" for one in places if isinstance(one, int)})


def test_an_inferred_map(machine: GpuMachine) -> None:
    actual = check(machine.run("device_maps", "inferred"))
    assert actual["right"]
    assert actual["places"] == ["0", "1", "2", "3", "cpu"] or actual["places"] == ["0", "1", "2", "3"]


def test_a_checkpoint_on_gpus_cpu_and_disk(machine: GpuMachine) -> None:
    actual = check(machine.run("device_maps", "loaded", (1, 3, "cpu", "disk")))
    assert actual["right"]
    assert actual["devices"] == ["cuda:1", "cuda:3", "meta"]


def test_streamed_weights_reach_only_the_gpu_that_computes(machine: GpuMachine) -> None:
    actual = check(machine.run("device_maps", "streamed"))
    assert actual["right"]
    assert actual["contexts"] == [3], "helper threads touched another GPU"
    assert actual["waits"] == []
    assert "GB/s" in actual["report"]


def test_reading_threads_use_the_gpu_of_their_process(machine: GpuMachine) -> None:
    actual = check(machine.run("device_maps", "loaded_by_threads"))
    assert actual["right"]
    assert actual["devices"] == ["cuda:3"]
    assert actual["contexts"] == [3]


@pytest.mark.parametrize(
    "case",
    ["as it is", "a file of torch", "converted", "converted one after the other", "in place", "in place, converted"],
)
def test_threads_read_slices_to_gpus(machine: GpuMachine, case: str) -> None:
    actual = check(machine.run("device_maps", "loaded_in_slices", case))
    assert actual["right"]
    assert actual["devices"] == (["cuda:3"] if "in place" in case else ["cpu", "cuda:0", "cuda:1", "cuda:2", "cuda:3"])
    assert actual["in place"] == ("in place" in case)
    floats = "float64" if case == "in place, converted" else "float16" if "converted" in case else "float32"
    assert actual["dtypes"] == [f"torch.{floats}", "torch.int64"]
    assert actual["num_pinned"] <= NUM_GPU_READERS
    assert set(actual["contexts"]) <= {0, 1, 2, 3}


def test_an_error_of_a_reading_thread_reaches_the_program(machine: GpuMachine) -> None:
    actual = check(machine.run("device_maps", "loading_that_fails"))
    assert actual["message"] == "a bad block"
    assert actual["threads"] == []
    assert actual["empty"]


def test_a_model_that_is_there_is_not_moved(machine: GpuMachine) -> None:
    assert check(machine.run("device_maps", "moved_to_the_current_gpu"))["moved"] == {}


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
@pytest.mark.parametrize(
    "kind",
    [
        "half on the CPU",
        "on two GPUs, the CPU and the disk",
        "cpu_offload",
        "cpu_offload, converted",
        "disk_offload",
    ],
)
def test_a_copy_computes_what_its_original_does(machine: GpuMachine, kind: str, how: str) -> None:
    actual = check(machine.run("device_maps", "copied", kind, how))
    assert actual["right"] == [True] * 5
    assert actual["gradient right"]
    assert actual["waits"] == [[]] * 5


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
@pytest.mark.parametrize("places", [[0, 0, "cpu"], ["cuda", 0, "cpu"], [0, "cuda:0", "cpu"]], ids=str)
def test_tied_weights_of_a_copy_are_its_own(machine: GpuMachine, places: list[Any], how: str) -> None:
    actual = check(machine.run("device_maps", "copied_with_tied_weights", tuple(places), how))
    assert actual["tied"] == [True] * 5
    assert actual["apart"]
    assert actual["zero"]


def test_state_dicts_of_offloaded_models_are_on_the_cpu(machine: GpuMachine) -> None:
    actual = check(machine.run("device_maps", "state_dicts"))
    assert actual == {"devices": ["cpu"], "right": True}


def test_reports_name_the_device_with_its_index(machine: GpuMachine) -> None:
    actual = machine.run("device_maps", "reports")
    assert actual == [actual[0]] * 3
    assert "cuda:0" in actual[0]


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        *[("streams_all", arguments) for arguments in test_gpu_streaming.SETTINGS],
        *[(body, ()) for body in test_gpu_streaming.BODIES],
    ],
)
def test_the_tests_for_a_real_gpu_pass_here(machine: GpuMachine, body: str, arguments: tuple[Any, ...]) -> None:
    assert machine.run("device_maps", "body_of_gpu_test", body, arguments) == "done"
