"""What `ProfileKwargs` makes of its words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel_state.settings.profile import ProfileKwargs


def test_a_built_profiler_records() -> None:
    with ProfileKwargs(activities=["cpu"], record_shapes=True).build() as profiler:
        torch.ones(2, 3) @ torch.ones(3, 4)
    events = [event for event in profiler.key_averages(group_by_input_shape=True) if event.key == "aten::mm"]
    assert events
    assert events[0].input_shapes[:2] == [[2, 3], [3, 4]]


def test_the_schedule_decides_when_traces_are_ready() -> None:
    ready: list[int] = []
    settings = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1},
        on_trace_ready=lambda profiler: ready.append(profiler.step_num),
    )
    with settings.build() as profiler:
        for _ in range(6):
            profiler.step()
    assert ready == [4]


def test_defaults_pass_nothing_on() -> None:
    assert ProfileKwargs().to_kwargs() == {}
    given: dict[str, Any] = {"with_flops": True, "output_trace_dir": "t"}
    assert ProfileKwargs(**given).to_kwargs() == given
    assert ProfileKwargs().build().activities


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ProfileKwargs(activities=["gpu"]), "'gpu'.*'cpu', 'xpu', 'mtia', 'cuda', 'hpu'"),  # type: ignore[list-item]
        (lambda: ProfileKwargs(activities=3), "activities=3"),  # type: ignore[arg-type]
        (lambda: ProfileKwargs(on_trace_ready=3), "on_trace_ready=3"),  # type: ignore[arg-type]
        (lambda: ProfileKwargs(schedule_option={"wiat": 1}).build(), r"'wiat'.*Did you mean 'wait'\?"),
        (lambda: ProfileKwargs(schedule_option={"wait": 1}).build(), "also has 'warmup', 'active'"),
    ],
)
def test_wrong_words_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can record CUDA")
def test_what_this_machine_cannot_record_is_left_out() -> None:
    with (
        pytest.warns(UserWarning, match="CUDA is not available"),
        ProfileKwargs(activities=["cpu", "cuda"]).build() as profiler,
    ):
        torch.ones(2) + 1
    assert any(event.name == "aten::add" for event in profiler.events())  # type: ignore[union-attr]
