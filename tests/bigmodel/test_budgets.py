"""What GPUs may give to a model, with GPUs that are pretended: there are none here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_bigmodel import budgets, get_max_memory

Pretend = Callable[..., None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Three GPUs, some of which are broken."""

    def become(broken: tuple[int, ...] = (), integrated: tuple[int, ...] = ()) -> None:
        def zeros(*_: Any, device: torch.device) -> None:
            if device.index in broken:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

        module = SimpleNamespace(
            mem_get_info=lambda number: (10 + number, 100),
            get_device_properties=lambda number: SimpleNamespace(is_integrated=number in integrated),
        )
        kind = SimpleNamespace(name="cuda", device_count=lambda: 3, module=lambda: module)
        monkeypatch.setattr(budgets, "detect_device_kind", lambda: kind)
        monkeypatch.setattr(torch, "zeros", zeros)

    return become


def test_a_gpu_that_is_full_is_left_out(pretend: Pretend, caplog: pytest.LogCaptureFixture) -> None:
    pretend(broken=(1,))
    with caplog.at_level(logging.WARNING):
        actual = get_max_memory()
    assert list(actual) == [0, 2, "cpu"]
    assert (actual[0], actual[2]) == (10, 12)
    assert "cuda:1 is left out of the device map: CUDA out of memory" in caplog.text
    pretend(broken=(0, 1, 2))
    assert list(get_max_memory()) == ["cpu"]


@pytest.mark.parametrize(("available", "left"), [(1000, 1000 - 12), (5, 0)])
def test_beside_other_gpus_the_cpu_has_what_integrated_ones_leave(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch, available: int, left: int
) -> None:
    pretend(integrated=(0, 1, 2))
    assert list(get_max_memory()) == [0, 1, 2]
    pretend(integrated=(1, 2))  # which share the same memory
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=available))
    assert get_max_memory() == {0: 10, 1: 11, 2: 12, "cpu": left}
