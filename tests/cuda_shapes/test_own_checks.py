"""`accelerate test` passes on a GPU."""

from __future__ import annotations

import pytest

from tests.cuda_shapes.driver import GpuMachine, missing
from tests.cuda_shapes.test_device_maps import check

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.mark.parametrize("is_launched", [False, True])
def test_all_checks_pass_on_a_gpu(machine: GpuMachine, is_launched: bool) -> None:
    actual = check(machine.run("own_checks", "run", is_launched))
    assert actual["status"] == 0, actual["complaints"]
    assert "cuda, mixed precision no" in actual["output"]
    assert " 0 failed" in actual["output"]
