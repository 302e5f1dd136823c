"""Curves as text: one line of blocks for a table, or a drawing of dots."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a braille character, by row and column
BLANK = 0x2800
UPPER, LOWER = 0x1B, 0xE4  # the dots of the upper and of the lower two rows
ASCII = str.maketrans(BLOCKS + "·…", "_.,-=+*#?~") | {
    BLANK + dots: " '.:"[bool(dots & UPPER) + 2 * bool(dots & LOWER)] for dots in range(256)
}
"""What stands for the characters of curves where the terminal's encoding lacks them, for `str.translate`."""


def sparkline(values: Sequence[float], width: int = 20) -> str:
    """A curve in one line of at most `width` characters, from its lowest to its highest finite value.

    Args:
        values: The curve, evenly spaced. What is not finite is drawn as "·".
        width: How many characters there may be; longer curves are averaged.
    """
    points = shrink(values, width)
    finite = [point for point in points if math.isfinite(point)]
    if not finite:
        return "·" * len(points)
    low, high = min(finite), max(finite)
    last = len(BLOCKS) - 1
    return "".join(
        BLOCKS[round(_height(point, low, high) * last)] if math.isfinite(point) else "·" for point in points
    )


def shrink(values: Sequence[float], length: int) -> list[float]:
    """A curve with at most `length` points, each the mean of the finite ones that it stands for."""
    if len(values) <= length:
        return list(values)
    points = []
    for index in range(length):
        bucket = values[index * len(values) // length : (index + 1) * len(values) // length]
        finite = [value for value in bucket if math.isfinite(value)]
        points.append(sum(finite) / len(finite) if finite else math.nan)
    return points


def drawing(values: Sequence[float], width: int = 60, height: int = 8) -> list[str]:
    """A curve as lines of braille dots, the highest first.

    Args:
        values: The curve, evenly spaced; what is not finite is left out.
        width: Characters in a line; two points each.
        height: Lines; four points each.
    """
    points = shrink(values, 2 * width)
    finite = [point for point in points if math.isfinite(point)]
    if not finite:
        return []
    low, high = min(finite), max(finite)
    cells = [[BLANK] * ((len(points) + 1) // 2) for _ in range(height)]
    before: int | None = None
    for column, point in enumerate(points):
        if not math.isfinite(point):
            before = None
            continue
        row = round((1 - _height(point, low, high)) * (4 * height - 1))
        start, stop = sorted((row, row if before is None else before))
        for filled in range(start, stop + 1):  # joins the point to the one before
            if filled != before or start == stop:
                cells[filled // 4][column // 2] |= DOTS[filled % 4][column % 2]
        before = row
    return ["".join(map(chr, line)) for line in cells]


def _height(point: float, low: float, high: float) -> float:
    """Where a point lies between the lowest, 0, and the highest, 1."""
    return (point / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.0  # halves do not overflow
