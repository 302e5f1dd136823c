"""The pretended GPUs compute what a CPU computes, and the recorder sees the mistakes that it is there for."""

from __future__ import annotations

import pytest

from tests.cuda_shapes.driver import GpuMachine, missing
from tests.cuda_shapes.planted_waits import CALLS

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
HARMLESS = {"to the device, not pinned", "pinned", "masked fill", "set by mask", "filled", "another gpu"}


def test_training_has_the_losses_of_a_cpu(machine: GpuMachine) -> None:
    expected = machine.run("planted_waits", "losses", "cpu")  # by other kernels of the CPU
    assert machine.run("planted_waits", "losses", "cuda:5") == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", list(CALLS))
def test_waits_are_seen(machine: GpuMachine, name: str) -> None:
    actual = machine.run("planted_waits", "waits_of_calls")
    assert "error" not in actual, actual["error"]
    assert (actual[name] > 0) == (name not in HARMLESS), actual[name]


def test_tensors_of_two_devices_cannot_meet(machine: GpuMachine) -> None:
    assert "same device" in machine.run("planted_waits", "mixed_devices")


def test_torch_says_which_device_a_group_does_not_serve(machine: GpuMachine) -> None:
    said = machine.run("planted_waits", "collective_of_a_cpu_tensor")
    assert "No backend type associated with device type cpu" in said
