"""Handlers: what is passed on, and how a list of them is sorted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from accel_state.settings.accumulation import GradientAccumulationPlugin
from accel_state.settings.ddp import DistributedDataParallelKwargs
from accel_state.settings.fp8 import MSAMPRecipeKwargs
from accel_state.settings.handlers import (
    AutocastKwargs,
    GradScalerKwargs,
    Handlers,
    InitProcessGroupKwargs,
    KwargsHandler,
)
from accel_state.settings.profile import ProfileKwargs


@dataclass
class Recorder(KwargsHandler):
    """A handler of somebody else, which knows nothing of options."""

    names: list[str] | None = None
    limit: int = 3

    def __post_init__(self) -> None:
        self.names = self.names or ["loss"]


def test_to_kwargs_holds_only_what_differs_from_the_defaults() -> None:
    assert AutocastKwargs().to_kwargs() == {}
    assert AutocastKwargs(enabled=False, cache_enabled=True).to_kwargs() == {"enabled": False, "cache_enabled": True}
    assert GradScalerKwargs(init_scale=1024.0, growth_interval=2000).to_kwargs() == {"init_scale": 1024.0}
    assert Recorder().to_kwargs() == {}
    recorder = Recorder(["acc"])
    assert recorder.to_kwargs() == {"names": ["acc"]}
    recorder.to_dict()["names"].append("b")
    assert recorder.names == ["acc"], "the dictionary is a copy"


@pytest.mark.parametrize(
    ("given", "timeout", "kwargs"),
    [
        ({}, 600, {}),
        ({"backend": "gloo"}, 1800, {"backend": "gloo", "timeout": timedelta(seconds=1800)}),
        ({"backend": None}, 1800, {"backend": None, "timeout": timedelta(seconds=1800)}),
        ({"timeout": timedelta(seconds=3)}, 3, {"timeout": timedelta(seconds=3)}),
        ({"timeout": 3}, 3, {"timeout": timedelta(seconds=3)}),
        ({"timeout": np.int64(3)}, 3, {"timeout": timedelta(seconds=3)}),
    ],
)
def test_the_timeout_depends_on_the_backend(given: dict[str, Any], timeout: int, kwargs: dict[str, Any]) -> None:
    settings = InitProcessGroupKwargs(**given)
    assert settings.timeout == timedelta(seconds=timeout)
    assert settings.to_kwargs() == kwargs


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InitProcessGroupKwargs(timeout=-3), r"timeout=-3 .*timedelta\(seconds=1800\)"),  # type: ignore[arg-type]
        (lambda: InitProcessGroupKwargs(timeout=timedelta(0)), "above zero"),
        (lambda: InitProcessGroupKwargs(timeout=float("inf")), "timeout=inf"),  # type: ignore[arg-type]
        (lambda: InitProcessGroupKwargs(timeout="30"), "timeout='30'"),  # type: ignore[arg-type]
        (lambda: InitProcessGroupKwargs(backend=3), "backend=3"),  # type: ignore[arg-type]
        (lambda: GradScalerKwargs(growth_factor=1.0), "growth_factor=1.0 .* above 1"),
        (lambda: GradScalerKwargs(backoff_factor=1.5), "below 1"),
        (lambda: GradScalerKwargs(growth_interval=0), "at least 1"),
        (lambda: AutocastKwargs(enabled=3), "AutocastKwargs.enabled=3"),  # type: ignore[arg-type]
    ],
)
def test_wrong_values_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_list_is_sorted_by_what_the_handlers_are_for() -> None:
    ddp, scaler, group = DistributedDataParallelKwargs(), GradScalerKwargs(), InitProcessGroupKwargs()
    autocast, profile, fp8 = AutocastKwargs(), ProfileKwargs(), MSAMPRecipeKwargs()
    handlers = Handlers.sort([fp8, profile, autocast, group, scaler, ddp])
    assert handlers == Handlers(ddp, scaler, group, autocast, profile, fp8)
    assert Handlers.sort(None) == Handlers.sort([]) == Handlers()
    mine = type("Mine", (AutocastKwargs,), {})()
    assert Handlers.sort([mine]).autocast is mine, "a user's subclass takes the place of its parent"


@pytest.mark.parametrize(
    "foreign", [GradientAccumulationPlugin(), {"enabled": True}, AutocastKwargs, None, Recorder()]
)
def test_what_is_no_handler_is_refused(foreign: Any) -> None:
    with pytest.raises(ValueError, match=r"kwargs_handlers\[1\]=.*DistributedDataParallelKwargs"):
        Handlers.sort([ProfileKwargs(), foreign])
    with pytest.raises(ValueError, match=r"AutocastKwargs\(enabled=True.*AutocastKwargs\(enabled=False.*at most one"):
        Handlers.sort([AutocastKwargs(), AutocastKwargs(enabled=False)])
