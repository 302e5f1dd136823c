"""Comparing runs: differing settings, common metrics, and points of their curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from accel_tracking.local.reading import Run
from accel_tracking.values import flatten

MISSING = object()


def flat_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by name, nested ones as `outer.inner`."""
    return dict(flatten(settings))


def differing_settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The settings that are not the same in all runs: name -> value in each run, `MISSING` where it has none."""
    settings = [flat_settings(run.settings) for run in runs]
    names = dict.fromkeys(name for of_run in settings for name in of_run)
    rows = {name: [of_run.get(name, MISSING) for of_run in settings] for name in names}
    return {name: row for name, row in rows.items() if any(value != row[0] for value in row)}


def metric_names(runs: Sequence[Run]) -> list[str]:
    """Every metric that a run has, in the order in which they first appear."""
    return list(dict.fromkeys(name for run in runs for name in run.metrics))


def common_metric(runs: Sequence[Run]) -> str | None:
    """The metric that the most runs would show first."""
    shown = [name for run in runs if (name := run.main_metric()) is not None]
    return max(dict.fromkeys(shown), key=shown.count, default=None)


def last_values(runs: Sequence[Run], metric: str) -> list[float]:
    """The last value of a metric in each run; NaN in those that lack it."""
    return [run.metrics[metric].last if metric in run.metrics else math.nan for run in runs]


def points(runs: Sequence[Run]) -> list[tuple[str, str, str, int, float, float]]:
    """Every point of every curve as a row: run, name, metric, step, Unix time, value."""
    return [
        (run.id, run.name, metric, step, when, value)
        for run in runs
        for metric, series in run.metrics.items()
        for step, when, value in zip(series.steps, series.times, series.values, strict=True)
    ]
