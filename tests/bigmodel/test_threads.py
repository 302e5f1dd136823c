"""Threads that call one model at a time, as those of a server do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_bigmodel.dispatch import cpu_offload, disk_offload


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_threads_take_turns_in_modules_whose_weights_come_and_go(place: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    inputs = torch.randn(4, 2, 64)
    with torch.no_grad():
        expected = [model(one) for one in inputs]
    model = cpu_offload(model) if place == "cpu" else disk_offload(model, tmp_path)

    def run(index: int) -> bool:
        with torch.no_grad():
            return all(torch.equal(model(inputs[index]), expected[index]) for _ in range(50))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run, range(4)))
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 3))
    with ThreadPoolExecutor(1) as other:  # a module that failed has given up its turn
        assert other.submit(model, torch.ones(2, 64)).result(timeout=300).shape == (2, 64)
