"""A prepared step takes the GPU memory of one by hand, and nothing of it stays."""

from __future__ import annotations

import pytest

from tests.cuda_shapes.driver import GpuMachine, missing
from tests.cuda_shapes.test_device_maps import check

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.mark.parametrize("how", ["alone", "one rank"])
def test_a_step_takes_the_memory_of_one_by_hand(machine: GpuMachine, how: str) -> None:
    by_hand, prepared = (check(machine.run("steps", "memory_of_a_step", name)) for name in ("by hand", how))
    assert by_hand["remaining"] == 0
    assert prepared["remaining"] == 0
    assert prepared["peak"] <= 1.002 * by_hand["peak"]
