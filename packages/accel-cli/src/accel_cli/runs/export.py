"""Runs as files for other programs and for people."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_tracking.local.reading import Run

HEADER = ("run", "name", "metric", "step", "time", "value")


def write_csv(runs: Sequence[Run], path: str) -> None:
    """Write every point of every curve as a row.

    Args:
        runs: The runs.
        path: The file; "-" for standard output.
    """
    from accel_tracking.local.comparing import points

    with nullcontext(sys.stdout) if path == "-" else open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        writer.writerows(points(runs))


def write_page(runs: Sequence[Run], path: str) -> None:
    """Write a page with the curves, settings, pictures and tables of runs.

    Args:
        runs: The runs.
        path: The file.
    """
    from accel_tracking.local.page import page

    names = sorted({run.name for run in runs})
    Path(path).write_text(page(runs, title=", ".join(names)), encoding="utf-8")
