"""Runs as lines of text for a terminal."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_tracking.local.reading import Run

WIDTH_OF_CURVE = 24
WIDTH_OF_DRAWING = 60
MAX_CELL = 40
MISSING = "-"


def listing(runs: Sequence[Run], metric: str | None, numbers: Mapping[str, int]) -> list[str]:
    """A table with a line for each run, and a sparkline of one metric."""
    from accel_tracking.local.curves import sparkline

    heads = ["#", "run", "status", "started", "time", "step"]
    if metric is not None:
        heads += [metric, "lowest", ""]
    rows = []
    for run in runs:
        row = [
            str(numbers[run.id]),
            run.id,
            run.status,
            moment(run.started),
            duration(run.seconds),
            whole(run.last_step),
        ]
        if metric is not None:
            series = run.metrics.get(metric)
            shown = [number(series.last), number(series.lowest)] if series else [MISSING, MISSING]
            row += [*shown, sparkline(series.values, WIDTH_OF_CURVE) if series else ""]
        rows.append(row)
    return table(heads, rows, right={0, 4, 5, 6, 7})


def details(runs: Sequence[Run], metric: str | None, numbers: Mapping[str, int]) -> list[str]:
    """The details of each run: status, settings, metrics, and one curve."""
    lines: list[str] = []
    for run in runs:
        lines += ["", *_details_of(run, metric)] if lines else _details_of(run, metric)
    return lines


def _details_of(run: Run, metric: str | None) -> list[str]:
    from accel_tracking.local.comparing import flat_settings

    facts: dict[str, str] = {
        "run": run.id,
        "name": run.name,
        "status": run.status + (f" ({run.reason})" if run.reason else ""),
        "started": moment(run.started),
        "time": duration(run.seconds),
        "folder": str(run.folder),
    }
    facts |= {name: " ".join(value) if name == "command" else shown(value) for name, value in run.facts.items()}
    lines = _pairs(facts)
    if run.num_damaged:
        lines.append(f"{run.num_damaged} damaged line{'s' if run.num_damaged > 1 else ''} of the record left out")
    settings = {name: shown(value) for name, value in flat_settings(run.settings).items()}
    if settings:
        lines += ["", "settings", *_pairs(settings, indent=2)]
    if run.metrics:
        lines += ["", *_metrics_of(run)]
    if metric in run.metrics:
        lines += ["", *_curve_of(run, metric)]
    if run.texts:
        lines += ["", "texts", *_pairs({name: clipped(text, 80) for name, text in run.texts.items()}, indent=2)]
    kept = [*(file for images in run.images.values() for _, file in images), *run.artifacts]
    if kept:
        lines += ["", "files", *(f"  {file}" for file in kept)]
    return lines


def _metrics_of(run: Run) -> list[str]:
    from accel_tracking.local.curves import sparkline

    rows = [
        [
            name, str(len(series.values)), number(series.last), number(series.lowest), number(series.highest),
            sparkline(series.values, WIDTH_OF_CURVE),
        ]
        for name, series in run.metrics.items()
    ]  # fmt: skip
    return table(["metric", "points", "last", "lowest", "highest", ""], rows, right={1, 2, 3, 4})


def _curve_of(run: Run, metric: str) -> list[str]:
    from accel_tracking.local.curves import drawing, shrink

    series = run.metrics[metric]
    points = shrink(series.values, 2 * WIDTH_OF_DRAWING)
    drawn = drawing(points, WIDTH_OF_DRAWING)
    if not drawn:
        return []
    finite = [point for point in points if math.isfinite(point)]
    labels = [number(max(finite)), *[""] * (len(drawn) - 2), number(min(finite))]
    margin = max(map(len, labels))
    ends = f"{series.steps[0]}".ljust(len(drawn[0]) - len(str(series.steps[-1]))) + str(series.steps[-1])
    return [metric, *(f"{label:>{margin}} {line}" for label, line in zip(labels, drawn, strict=True)),
            " " * (margin + 1) + ends]  # fmt: skip


def comparison(runs: Sequence[Run], metric: str | None, numbers: Mapping[str, int]) -> list[str]:
    """A comparison of runs: the settings that differ, and the last value of every metric."""
    from accel_tracking.local.comparing import MISSING as NOT_SET
    from accel_tracking.local.comparing import differing_settings, last_values, metric_names
    from accel_tracking.local.curves import sparkline

    heads = ["", *(run.id for run in runs)]
    rows = [
        ["status", *(run.status for run in runs)],
        ["started", *(moment(run.started) for run in runs)],
        ["time", *(duration(run.seconds) for run in runs)],
        ["step", *(whole(run.last_step) for run in runs)],
    ]
    differing = differing_settings(runs)
    rows.append(["settings that differ", *[""] * len(runs)] if differing else ["settings", *["identical"] * len(runs)])
    rows += [
        [f"  {name}", *(MISSING if value is NOT_SET else clipped(shown(value), MAX_CELL) for value in values)]
        for name, values in differing.items()
    ]
    rows.append(["last value of", *[""] * len(runs)])
    rows += [[f"  {name}", *map(number, last_values(runs, name))] for name in metric_names(runs)]
    if metric is not None:
        curves = [run.metrics[metric].values if metric in run.metrics else [] for run in runs]
        lowest = [number(run.metrics[metric].lowest) if metric in run.metrics else MISSING for run in runs]
        rows.append([f"lowest {metric}", *lowest])
        rows.append([metric, *(sparkline(curve, WIDTH_OF_CURVE) for curve in curves)])
    return table(heads, rows)


# ---- cells ----------------------------------------------------------------------------------------------------------


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: set[int] | None = None) -> list[str]:
    """Lines of a table without frames.

    Args:
        heads: Titles of the columns.
        rows: The cells.
        right: Indices of the columns that are aligned right.
    """
    widths = [max(len(row[place]) for row in [heads, *rows]) for place in range(len(heads))]
    return [
        "  ".join(
            cell.rjust(width) if place in (right or ()) else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [heads, *rows]
    ]


def _pairs(values: Mapping[str, str], indent: int = 0) -> list[str]:
    width = max(map(len, values))
    return [f"{' ' * indent}{name:<{width}}  {value}" for name, value in values.items()]


def number(value: float) -> str:
    """A number with five digits."""
    return MISSING if math.isnan(value) else f"{value:.5g}"


def whole(value: int | None) -> str:
    """An integer, or a dash."""
    return MISSING if value is None else str(value)


def moment(when: float) -> str:
    """A Unix time as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(when)) if math.isfinite(when) else MISSING


def duration(seconds: float) -> str:
    """A duration in seconds, minutes or hours."""
    if not math.isfinite(seconds):
        return MISSING
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def shown(value: Any) -> str:
    """A setting as a `str`."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def clipped(text: str, length: int) -> str:
    """A text in one line of at most `length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"
