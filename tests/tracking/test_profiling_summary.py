"""The summary of a profile: to which part of a step each moment belongs, and what it says."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_state.settings.profile import ProfileKwargs
from accel_tracking import profiling_summary
from accel_tracking.profiling import record_profile
from accel_tracking.profiling_summary import LABELS, Phase, ProfileSummary, phase_of, scaled, summarize, time
from tests.support.ranks import ranks


def train() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for inputs, targets in DataLoader(TensorDataset(torch.randn(64, 64), torch.zeros(64).long()), batch_size=16):
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def summary_of(profiler: Any) -> ProfileSummary:
    summary = summarize(profiler)
    assert summary is not None
    return summary


def test_every_part_of_a_step_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    with record_profile(ProfileKwargs(activities=["cpu"], with_flops=True, profile_memory=True)) as profiler:
        train()
    summary = summary_of(profiler)
    for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        assert summary.shares[phase] > 0, phase
    assert summary.shares[Phase.COMMUNICATION] == 0
    assert sum(summary.shares.values()) == pytest.approx(1)
    assert summary.flops > 4 * 2 * 16 * 64 * 64  # forward alone
    assert summary.device_idle is None
    text = str(summary)
    assert len(text.splitlines()) <= 20
    assert all(label in text for label in LABELS.values())
    assert "FLOP/s" in text

    monkeypatch.setattr(profiling_summary, "NUM_OPERATORS", 1000)  # which ones took most is the machine's affair
    every = summary_of(profiler)
    assert every.operators[: len(summary.operators)] == summary.operators
    assert every.operators == sorted(every.operators, key=lambda operator: -operator.seconds)
    assert sum(operator.share for operator in every.operators) == pytest.approx(1)
    linear = next(operator for operator in every.operators if operator.name == "aten::addmm")
    assert (linear.calls, linear.flops) == (8, 4 * 2 * 16 * 64 * (64 + 2))
    assert "memory" in str(every)


@ranks(2)
def test_communication_is_seen(rank: int, world: int) -> None:
    with record_profile(ProfileKwargs(activities=["cpu"])) as profiler:
        for _ in range(5):
            torch.ones(1000).sum()
            torch.distributed.all_reduce(torch.ones(200_000))
    summary = summary_of(profiler)
    assert summary.shares[Phase.COMMUNICATION] > 0


def test_ranges_that_users_name_are_looked_into() -> None:
    with record_profile(ProfileKwargs(activities=["cpu"])) as profiler, torch.profiler.record_function("my step"):
        train()
    summary = summary_of(profiler)
    assert summary.shares[Phase.OPTIMIZER] > 0
    assert summary.shares[Phase.DATA] > 0


def test_the_accelerator_says_it_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    with accelerator.profile(ProfileKwargs(activities=["cpu"])):
        train()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "data loading" in shown.err
    with accelerator.profile(ProfileKwargs(activities=["cpu"]), summary=False):
        train()
    assert "data loading" not in capsys.readouterr().err


def test_nothing_recorded_has_no_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = ProfileKwargs(activities=["cpu"], schedule_option={"wait": 5, "warmup": 1, "active": 1})
    with record_profile(idle, summary=True) as profiler:
        profiler.step()
    assert summarize(profiler) is None
    with record_profile(ProfileKwargs(activities=["cpu"])) as profiler:
        torch.ones(2).add(1)
    monkeypatch.setattr(profiling_summary, "MAX_EVENTS", 0)
    assert summarize(profiler) is None


@pytest.mark.filterwarnings("ignore")  # of torch, about warm-up that ends early; as errors they make it crash
def test_a_schedule_may_end_at_any_step() -> None:
    layer = torch.nn.Linear(4, 4)
    schedule = {"wait": 1, "warmup": 1, "active": 1}
    for option in (schedule, {**schedule, "repeat": 2}, {**schedule, "skip_first": 1}, {**schedule, "active": 3}):
        for num_steps in range(12):
            recordings: list[Any] = []
            handler = ProfileKwargs(activities=["cpu"], schedule_option=option, on_trace_ready=recordings.append)
            with record_profile(handler, summary=True) as profiler:
                for _ in range(num_steps):
                    layer(torch.ones(1, 4))
                    profiler.step()
            cycle = 2 + option["active"]
            steps = num_steps - option.get("skip_first", 0)
            complete = min(steps // cycle, option.get("repeat") or steps) if steps > 0 else 0
            assert len(recordings) >= complete, (option, num_steps)


def test_with_a_schedule_its_recording_counts() -> None:
    once = ProfileKwargs(activities=["cpu"], schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1})
    with record_profile(once) as profiler:
        for _ in range(6):
            train()
            profiler.step()
    summary = summary_of(profiler)
    assert summary.shares[Phase.OPTIMIZER] > 0


# ---- arithmetic -----------------------------------------------------------------------------------------------------


class Kind(Enum):
    CPU = 0
    CUDA = 1


class Made:
    """An event as torch's profiler makes it."""

    def __init__(self, name: str, start: float, end: float, kind: Kind = Kind.CPU, **rest: Any) -> None:
        self.name, self.device_type = name, kind
        self.time_range = type("Range", (), {"start": start, "end": end})()
        self.is_user_annotation = rest.get("named", False)
        self.kernels = [type("Kernel", (), {"name": what, "duration": us})() for what, us in rest.get("kernels", ())]
        self.cpu_children: list[Made] = rest.get("children", [])
        self.cpu_parent: Made | None = None
        for child in self.cpu_children:
            child.cpu_parent = self


def test_each_moment_counts_once() -> None:
    events = [
        Made("enumerate(DataLoader)#next", 0, 10),
        Made("aten::linear", 20, 30),
        Made("aten::relu", 34, 40),  # what Python does between the two is forward, too
        Made("autograd::engine::evaluate_function: X", 40, 60),
        Made("gloo:all_reduce", 50, 80),  # half of it behind the backward pass
        Made("Optimizer.step#SGD.step", 80, 100),
    ]
    timeline = profiling_summary._Timeline(events)
    assert timeline.shares() == pytest.approx(
        {
            Phase.DATA: 0.1, Phase.FORWARD: 0.2, Phase.BACKWARD: 0.2, Phase.OPTIMIZER: 0.2, Phase.COMMUNICATION: 0.2,
            Phase.OTHER: 0.1,
        }
    )  # fmt: skip
    assert timeline.hidden_communication() == pytest.approx(0.1)


def test_kernels_belong_to_what_launched_them() -> None:
    forward = Made("step", 0, 50, named=True, children=[Made("aten::linear", 0, 40, kernels=[("gemm", 30)])])
    backward = Made("autograd::engine::x", 50, 90, kernels=[("gemm", 40), ("ncclDevKernel_AllReduce", 10)])
    kernels = [
        Made("gemm", 10, 40, Kind.CUDA),
        Made("gemm", 50, 90, Kind.CUDA),
        Made("ncclDevKernel", 85, 95, Kind.CUDA),
    ]
    shares = profiling_summary._device_shares([forward, *forward.cpu_children, backward], kernels, 100.0)
    assert shares == {
        Phase.FORWARD: 0.3, Phase.BACKWARD: 0.4, Phase.OPTIMIZER: 0, Phase.COMMUNICATION: 0.1, Phase.OTHER: 0,
    }  # fmt: skip
    assert profiling_summary._idle(kernels, 100.0) == pytest.approx(0.25)
    shown = ProfileSummary(1e-4, dict.fromkeys(LABELS, 0.0), 0.0, shares, 0.25, [], 0)
    assert "device idle" in str(shown)
    assert "30.0%" in str(shown)


def test_names_and_numbers() -> None:
    assert phase_of("Optimizer.zero_grad#AdamW.zero_grad") is Phase.OPTIMIZER
    assert phase_of("aten::add") is None
    assert (scaled(2.5e12), scaled(999), time(0.0025), time(3e-6)) == ("2.5 T", "999 ", "2.5 ms", "3 us")
