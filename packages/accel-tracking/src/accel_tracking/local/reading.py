"""Reading recorded runs."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_state.process_ids import is_running
from accel_tracking.local.record import FILE, FOLDER

MAX_DEPTH = 6  # of folders below the one that is searched
PASSED_OVER = frozenset({"checkpoints", "node_modules", "site-packages", "__pycache__"})
SECONDS_OF_SILENCE = 300.0  # after which a run on another machine counts as lost
LOSSES = ("loss", "train/loss", "train_loss", "training_loss")  # which metric is shown first


@dataclass
class Series:
    """The points of one metric, in the order in which they were logged."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, step: int, value: float, when: float) -> None:
        """Append a point."""
        self.steps.append(step)
        self.values.append(value)
        self.times.append(when)

    def truncate_at(self, step: int) -> None:
        """Drop the points at and after a step, because the run was resumed there."""
        indices = [index for index, at in enumerate(self.steps) if at < step]
        self.steps = [self.steps[index] for index in indices]
        self.values = [self.values[index] for index in indices]
        self.times = [self.times[index] for index in indices]

    @property
    def finite(self) -> list[float]:
        """The finite values."""
        return [value for value in self.values if math.isfinite(value)]

    @property
    def last(self) -> float:
        """The last value; NaN when there is none."""
        return self.values[-1] if self.values else math.nan

    @property
    def lowest(self) -> float:
        """The smallest finite value; NaN when there is none."""
        return min(self.finite, default=math.nan)

    @property
    def highest(self) -> float:
        """The largest finite value; NaN when there is none."""
        return max(self.finite, default=math.nan)


@dataclass
class Run:
    """A recorded run.

    Attributes:
        id: Name of its folder.
        folder: Its folder.
        name: The project name of `init_trackers`.
        started: Unix time in seconds.
        ended: Unix time of the last line.
        status: "running", "finished", "failed", "terminated" (by SIGTERM), or "lost" when it ended without a final line.
        reason: The error that ended it, if there was one.
        settings: Its configuration.
        metrics: Its curves, by name.
        texts: The last str logged for each name.
        images: Name -> (step, file relative to `folder`), in order.
        tables: The last table of each name: `step`, `columns`, `data`.
        artifacts: Files relative to `folder`.
        facts: Facts about the process: command, host, Python version, number of processes, notes.
        num_damaged: Lines that could not be read.
    """

    id: str
    folder: Path
    name: str = ""
    started: float = math.nan
    ended: float = math.nan
    status: str = "lost"
    reason: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Series] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    images: dict[str, list[tuple[int | None, str]]] = field(default_factory=dict)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    artifacts: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    num_damaged: int = 0

    @property
    def seconds(self) -> float:
        """How long it ran, or has been running."""
        return (time.time() if self.status == "running" else self.ended) - self.started

    @property
    def last_step(self) -> int | None:
        """The highest step of any metric; None when nothing was logged."""
        return max((series.steps[-1] for series in self.metrics.values() if series.steps), default=None)

    def main_metric(self) -> str | None:
        """The name of the metric to show first: a loss if there is one."""
        losses = [name for name in LOSSES if name in self.metrics]
        losses += [name for name in self.metrics if "loss" in name.lower()]
        return next(iter([*losses, *self.metrics]), None)


# ---- finding --------------------------------------------------------------------------------------------------------


def find_runs(folder: str | os.PathLike[str]) -> list[Path]:
    """The folders of all runs recorded below a folder, or in it."""
    root = Path(folder)
    if (root / FILE).is_file():
        return [root]
    folders = []
    for path, names, files in os.walk(root):
        if FILE in files and Path(path).parent.name == FOLDER:
            folders.append(Path(path))
            names.clear()
            continue
        depth = len(Path(path).relative_to(root).parts)
        names[:] = sorted(
            name for name in names if depth < MAX_DEPTH and name not in PASSED_OVER and not name.startswith(".")
        )
    return folders


def read_runs(folder: str | os.PathLike[str]) -> list[Run]:
    """All runs recorded below a folder, the newest first."""
    runs = [read_run(path) for path in find_runs(folder)]
    return sorted(runs, key=lambda run: -run.started if math.isfinite(run.started) else math.inf)


# ---- reading --------------------------------------------------------------------------------------------------------


def read_run(folder: Path) -> Run:
    """Read one run; lines that are torn or damaged are skipped and counted."""
    run = Run(folder.resolve().name, folder)
    reading = _Reading(run)
    for line in _lines(folder / FILE):
        try:
            entry = json.loads(line)
            reading.add(entry)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            run.num_damaged += 1
    reading.resolve_status()
    return run


def _lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        for line in file:
            if line.strip(b"\0\r\n \t"):
                yield line


class _Reading:
    """Fills a run from the lines of its record."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.process: dict[str, Any] = {}
        self.to_truncate: set[str] = set()  # metrics that may have points after the step at which the run resumed
        self.next_step = 0

    def add(self, entry: dict[str, Any]) -> None:
        """Add one line to the run."""
        kind = entry.get("kind", "values")
        handler = getattr(self, f"_add_{kind}", None)
        if handler is None:  # of a later format
            return
        handler(entry)
        self.run.ended = float(entry["time"])

    def _add_start(self, entry: dict[str, Any]) -> None:
        run = self.run
        if math.isnan(run.started):
            run.started, run.name = float(entry["time"]), str(entry["name"])
        self.to_truncate = set(run.metrics)
        self.process = {name: entry.get(name) for name in ("host", "pid", "pid_started")}
        fact_names = ("command", "host", "python", "processes", "notes")
        run.facts |= {name: entry[name] for name in fact_names if entry.get(name) is not None}
        run.status, run.reason = "lost", None

    def _add_settings(self, entry: dict[str, Any]) -> None:
        self.run.settings |= entry["values"]

    def _add_values(self, entry: dict[str, Any]) -> None:
        step = entry["step"]
        step = self.next_step if step is None else int(step)
        self.next_step = step + 1
        self._add_each("", entry["values"], step, float(entry["time"]))

    def _add_each(self, prefix: str, values: dict[str, Any], step: int, when: float) -> None:
        for name, value in values.items():
            name = prefix + name
            if isinstance(value, dict):
                self._add_each(f"{name}/", value, step, when)
            elif (number := _number(value)) is None:
                self.run.texts[name] = value if isinstance(value, str) else json.dumps(value)
            else:
                series = self.run.metrics.setdefault(name, Series())
                if name in self.to_truncate:
                    self.to_truncate.remove(name)
                    series.truncate_at(step)
                series.add(step, number, when)

    def _add_image(self, entry: dict[str, Any]) -> None:
        self.run.images.setdefault(entry["name"], []).append((entry["step"], entry["file"]))

    def _add_table(self, entry: dict[str, Any]) -> None:
        self.run.tables[entry["name"]] = {name: entry[name] for name in ("step", "columns", "data")}

    def _add_artifact(self, entry: dict[str, Any]) -> None:
        if entry["file"] not in self.run.artifacts:
            self.run.artifacts.append(entry["file"])

    def _add_end(self, entry: dict[str, Any]) -> None:
        self.run.status, self.run.reason = str(entry["status"]), entry.get("reason")

    def resolve_status(self) -> None:
        """Distinguish a run that is still running from one that exited without a final line."""
        if self.run.status == "lost" and self.process and _is_alive(self.process, self.run.ended):
            self.run.status = "running"


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, (int, float)):
        return value
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else None


def _is_alive(process: dict[str, Any], last_heard: float) -> bool:
    import socket

    if process["host"] != socket.gethostname():
        return time.time() - last_heard < SECONDS_OF_SILENCE
    return is_running(int(process["pid"]), int(process["pid_started"] or 0))
