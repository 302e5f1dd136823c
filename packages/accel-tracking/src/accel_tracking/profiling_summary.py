"""A summary of a profile: the time of each phase of a training step, and the operators that took most."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NUM_OPERATORS = 8
MAX_EVENTS = 2_000_000  # reading more would take minutes

Interval = tuple[float, float]


class Phase(IntEnum):
    """A phase of a training step. Where several overlap in time, time is assigned to the first of them in this order."""

    DATA = 0
    OPTIMIZER = 1
    BACKWARD = 2
    FORWARD = 3
    COMMUNICATION = 4
    OTHER = 5


LABELS = {
    Phase.DATA: "data loading",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.OPTIMIZER: "optimizer",
    Phase.COMMUNICATION: "communication",
    Phase.OTHER: "other",
}
"""In the order in which they are shown."""

PREFIXES: dict[str, Phase] = {
    "enumerate(DataLoader)": Phase.DATA,
    "Optimizer.": Phase.OPTIMIZER,
    "autograd::engine::": Phase.BACKWARD,
    "c10d::": Phase.COMMUNICATION,
    "_c10d_functional::": Phase.COMMUNICATION,
    "record_param_comms": Phase.COMMUNICATION,
    "gloo:": Phase.COMMUNICATION,
    "nccl": Phase.COMMUNICATION,
    "mpi:": Phase.COMMUNICATION,
    "ucc:": Phase.COMMUNICATION,
    "xccl": Phase.COMMUNICATION,
    "hccl": Phase.COMMUNICATION,
}
"""Prefixes of the names of torch's own ranges. Operators outside of them all belong to a forward pass."""


@dataclass(frozen=True)
class Operator:
    """All calls of one operator.

    Attributes:
        name: Its name.
        calls: How often it was called.
        seconds: Time in it and not in operators it called: on the device if there is one, else on the CPU.
        share: The same, as a fraction of all operators.
        flops: Floating point operations; 0 when they were not estimated.
        bytes: Memory it allocated and did not release; 0 when that was not recorded.
    """

    name: str
    calls: int
    seconds: float
    share: float
    flops: int
    bytes: int


@dataclass(frozen=True)
class ProfileSummary:
    """The summary of a profile; `str()` of it has some twenty lines.

    Attributes:
        seconds: From the first recorded operator to the end of the last.
        shares: Fraction of that time that each phase took on the host; they add up to 1.
        hidden_communication: Fraction of the time in which communication overlapped with other work.
        device_shares: The same on the device: what each phase's kernels took. Empty without a device.
        device_idle: Fraction of the time in which the device was idle; None without a device.
        operators: Those that took most time.
        flops: Floating point operations in total; 0 when they were not estimated.
    """

    seconds: float
    shares: dict[Phase, float]
    hidden_communication: float
    device_shares: dict[Phase, float]
    device_idle: float | None
    operators: list[Operator]
    flops: int

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def summarize(profiler: torch.profiler.profile) -> ProfileSummary | None:
    """Read a profile that has ended.

    Args:
        profiler (`torch.profiler.profile`): The profiler; with a schedule, its last recording is used.

    Returns:
        The summary; None when nothing was recorded, or too much to be read in reasonable time.
    """
    inner = profiler.profiler
    results = getattr(inner, "kineto_results", None)
    if inner is None or results is None or len(results.events()) > MAX_EVENTS:
        return None
    events = [event for event in profiler.events() or [] if event.name != "[memory]"]
    host = [event for event in events if event.device_type.name == "CPU"]
    device = [event for event in events if event.device_type.name != "CPU" and not event.is_user_annotation]
    if next(_phases([event for event in host if event.cpu_parent is None]), None) is None:
        return None  # nothing, or an active step that had only begun
    timeline = _Timeline(host)
    operators = _operators(profiler, on_device=bool(device))
    return ProfileSummary(
        seconds=timeline.length / 1e6,
        shares=timeline.shares(),
        hidden_communication=timeline.hidden_communication(),
        device_shares=_device_shares(host, device, timeline.length),
        device_idle=_idle(device, timeline.length) if device else None,
        operators=operators[:NUM_OPERATORS],
        flops=sum(operator.flops for operator in operators),
    )


# ---- phases ---------------------------------------------------------------------------------------------------------


def phase_of(name: str) -> Phase | None:
    """The phase of one of torch's own ranges; None for any other name."""
    return next((phase for prefix, phase in PREFIXES.items() if name.startswith(prefix)), None)


def _phases(events: Iterable[Any]) -> Iterator[tuple[Any, Phase]]:
    """The outermost events that have a phase. Ranges that users name are looked into."""
    for event in events:
        phase = phase_of(event.name)
        if phase is None and (event.is_user_annotation or event.name.startswith("ProfilerStep")):
            yield from _phases(event.cpu_children)
        else:
            yield event, Phase.FORWARD if phase is None else phase


class _Timeline:
    """The host's time, each moment given to one phase.

    Times are in microseconds. A moment between two operators of one phase belongs to that phase.
    """

    def __init__(self, events: Sequence[Any]) -> None:
        spans: dict[Phase, list[Interval]] = {phase: [] for phase in Phase}
        for event, phase in _phases([event for event in events if event.cpu_parent is None]):
            spans[phase].append((event.time_range.start, event.time_range.end))
        spans[Phase.COMMUNICATION] += [  # of any thread, at any depth
            (event.time_range.start, event.time_range.end)
            for event in events
            if phase_of(event.name) is Phase.COMMUNICATION
        ]
        self.communication = merged(spans[Phase.COMMUNICATION])
        self.segments = _exclusive(spans)
        self.start = min(start for start, _, _ in self.segments)
        self.length = max(max(end for _, end, _ in self.segments) - self.start, 1e-9)

    def shares(self) -> dict[Phase, float]:
        """Fraction of each phase in the total time."""
        times = dict.fromkeys(LABELS, 0.0)
        before: tuple[float, float, Phase] | None = None
        for start, end, phase in self.segments:
            times[phase] += end - start
            if before is not None and start > before[1]:
                times[phase if phase is before[2] else Phase.OTHER] += start - before[1]
            before = (start, end, phase)
        return {phase: time / self.length for phase, time in times.items()}

    def hidden_communication(self) -> float:
        """Fraction of the time in which communication overlapped with other work."""
        shown = sum(end - start for start, end, phase in self.segments if phase is Phase.COMMUNICATION)
        return max(0.0, sum(end - start for start, end in self.communication) - shown) / self.length


def merged(spans: Iterable[Interval]) -> list[Interval]:
    """Intervals that do not overlap and cover the same moments, in order."""
    joined: list[Interval] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _exclusive(spans: dict[Phase, list[Interval]]) -> list[tuple[float, float, Phase]]:
    """Clip the intervals so that each moment has one phase, the first of those that overlap there."""
    edges = sorted(
        (moment, change, phase)
        for phase, intervals in spans.items()
        for start, end in merged(intervals)
        for moment, change in ((start, 1), (end, -1))
    )
    num_active = [0] * len(Phase)
    segments: list[tuple[float, float, Phase]] = []
    for index, (moment, change, phase) in enumerate(edges):
        num_active[phase] += change
        following = edges[index + 1][0] if index + 1 < len(edges) else moment
        current = next((each for each in Phase if num_active[each]), None)
        if current is not None and following > moment:
            segments.append((moment, following, current))
    return segments or [(edges[0][0], edges[-1][0], Phase.OTHER)]


# ---- the device -----------------------------------------------------------------------------------------------------


def _device_shares(host: Sequence[Any], device: Sequence[Any], length: float) -> dict[Phase, float]:
    if not device:
        return {}
    times: dict[Phase, float] = {phase: 0.0 for phase in LABELS if phase is not Phase.DATA}
    for event, phase in _phases([event for event in host if event.cpu_parent is None]):
        for kernel in _kernels(event):
            kernel_phase = phase_of(kernel.name.lower())
            times[kernel_phase or (phase if phase in times else Phase.OTHER)] += kernel.duration
    return {phase: time / length for phase, time in times.items()}


def _kernels(event: Any) -> Iterator[Any]:
    yield from event.kernels
    for child in event.cpu_children:
        yield from _kernels(child)


def _idle(device: Sequence[Any], length: float) -> float:
    busy = merged((event.time_range.start, event.time_range.end) for event in device)
    return max(0.0, 1 - sum(end - start for start, end in busy) / length)


# ---- operators ------------------------------------------------------------------------------------------------------


def _operators(profiler: torch.profiler.profile, on_device: bool) -> list[Operator]:
    side = "device" if on_device else "cpu"
    rows = [
        row
        for row in profiler.key_averages()
        if not row.is_user_annotation and not row.key.startswith(("[memory]", "ProfilerStep"))
    ]
    rows = [row for row in rows if row.device_type.name == "CPU"]
    time_of = {id(row): getattr(row, f"self_{side}_time_total") for row in rows}
    total = sum(time_of.values()) or 1.0
    operators = [
        Operator(
            name=row.key,
            calls=row.count,
            seconds=time_of[id(row)] / 1e6,
            share=time_of[id(row)] / total,
            flops=int(row.flops or 0),
            bytes=int(getattr(row, f"self_{side}_memory_usage", 0) or 0),
        )
        for row in rows
    ]
    return sorted(operators, key=lambda operator: operator.seconds, reverse=True)


# ---- as text --------------------------------------------------------------------------------------------------------


def _lines(summary: ProfileSummary) -> Iterator[str]:
    rate = f", {scaled(summary.flops / summary.seconds)}FLOP/s" if summary.flops else ""
    yield f"Profile of {time(summary.seconds)}{rate}"
    yield ""
    device = summary.device_shares
    yield f"{'':<14}{'host':>7}" + (f"{'device':>9}" if device else "")
    for phase, label in LABELS.items():
        line = f"{label:<14}{summary.shares[phase]:>7.1%}" + (f"{device[phase]:>9.1%}" if phase in device else "")
        if phase is Phase.COMMUNICATION and summary.hidden_communication >= 0.0005:
            line += f"  and {summary.hidden_communication:.1%} overlapped with other work"
        yield line
    if summary.device_idle is not None:
        yield f"{'device idle':<14}{'':>7}{summary.device_idle:>9.1%}"
    yield ""
    has_flops = any(operator.flops for operator in summary.operators)
    has_bytes = any(operator.bytes for operator in summary.operators)
    width = max([8, *(min(len(operator.name), 60) for operator in summary.operators)])
    yield (
        f"{'operator':<{width}}{'calls':>8}{'time':>11}{'share':>8}"
        + (f"{'FLOP':>9}" if has_flops else "")
        + (f"{'memory':>11}" if has_bytes else "")
    )
    for operator in summary.operators:
        yield (
            f"{operator.name[:60]:<{width}}{operator.calls:>8}{time(operator.seconds):>11}{operator.share:>8.1%}"
            + (f"{scaled(operator.flops):>9}" if has_flops else "")
            + (f"{scaled(operator.bytes)}B".rjust(11) if has_bytes else "")
        )


def time(seconds: float) -> str:
    """A short time with its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def scaled(value: float) -> str:
    """A number with a prefix: 2.5e12 is "2.5 T"."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "
