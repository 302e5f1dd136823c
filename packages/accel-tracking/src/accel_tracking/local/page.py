"""Runs as one self-contained HTML page with curves, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from accel_tracking.local.comparing import flat_settings
from accel_tracking.local.reading import Run, Series

TEMPLATE = "page.html"
PLACE_FOR_DATA = "{{ data }}"
MAX_POINTS = 2000  # of a curve; longer ones keep the lowest and highest point of each stretch
MAX_IMAGES = 6  # of a name in a run, the last ones
MAX_IMAGE_BYTES = 512 * 1024


def page(runs: Sequence[Run], title: str = "Runs") -> str:
    """The page.

    Args:
        runs: What to show, in this order.
        title: Heading of the page.
    """
    data = {"title": title, "runs": [_of_run(run) for run in runs]}
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    # inside a script element, "</script" and "<!--" are the only strings that HTML itself would parse
    text = text.replace("<", "\\u003c")
    template = files("accel_tracking.local").joinpath(TEMPLATE).read_text(encoding="utf-8")
    return template.replace(PLACE_FOR_DATA, text)


def _of_run(run: Run) -> dict[str, Any]:
    return {
        "id": run.id,
        "name": run.name,
        "status": run.status,
        "reason": run.reason,
        "started": _finite(run.started),
        "seconds": _finite(run.seconds),
        "settings": {name: _shown(value) for name, value in flat_settings(run.settings).items()},
        "facts": {name: _shown(value) for name, value in run.facts.items()},
        "metrics": {name: _of_series(series, run.started) for name, series in run.metrics.items()},
        "texts": run.texts,
        "tables": {
            name: {
                "step": table["step"],
                "columns": [_shown(column) for column in table["columns"]],
                "data": [[_shown(cell) for cell in row] for row in table["data"]],
            }
            for name, table in run.tables.items()
        },
        "images": {
            name: [
                {"step": step, "source": source}
                for step, file in shown[-MAX_IMAGES:]
                if (source := _image_source(run.folder, file)) is not None
            ]
            for name, shown in run.images.items()
        },
        "artifacts": run.artifacts,
    }


def _of_series(series: Series, started: float) -> dict[str, Any]:
    indices = thinned(series.values, MAX_POINTS)
    return {
        "steps": [series.steps[index] for index in indices],
        "values": [_finite(series.values[index]) for index in indices],
        "seconds": [_finite(round(series.times[index] - started, 3)) for index in indices],
        "last": _finite(series.last),
        "lowest": _finite(series.lowest),
        "highest": _finite(series.highest),
        "count": len(series.values),
    }


def thinned(values: Sequence[float], length: int) -> list[int]:
    """Indices of the points to keep, so that at most `length` remain and every peak is still there."""
    if len(values) <= length:
        return list(range(len(values)))
    point_indices = {0, len(values) - 1}
    stretches = (length - 2) // 2
    for stretch in range(stretches):
        indices = range(stretch * len(values) // stretches, (stretch + 1) * len(values) // stretches)
        finite = [index for index in indices if math.isfinite(values[index])]
        if finite:
            point_indices |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    return sorted(point_indices)


def _image_source(folder: Path, file: str) -> str | None:
    path = (folder / file).resolve()
    if folder.resolve() not in path.parents or not path.is_file() or path.stat().st_size > MAX_IMAGE_BYTES:
        return None
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
