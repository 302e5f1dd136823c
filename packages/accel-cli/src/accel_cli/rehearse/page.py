"""A rehearsal as one self-contained HTML page: the report, and the memory of a step over its operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from accel_cli.rehearse.devices import Device
from accel_cli.rehearse.report import as_text, size
from accel_cli.rehearse.result import HOST, Result
from accel_cli.rehearse.sweep import Row

WIDTH, HEIGHT, LEFT, BOTTOM = 960, 320, 80, 24
COLORS = (
    "#4477aa",
    "#66ccee",
    "#228833",
    "#ccbb44",
    "#ee6677",
    "#aa3377",
    "#bbbbbb",
)  # told apart by colour-blind readers, too
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}"
    "pre{overflow-x:auto;background:#f6f6f6;padding:1rem;font-size:13px}svg{width:100%;height:auto}"
    ".key{display:inline-block;margin-right:1.2rem}.key i{display:inline-block;width:.8em;height:.8em;margin-right:.4em}"
)


def write_page(path: str, script: str, result: Result, device: Device, rows: Sequence[Row] = ()) -> None:
    """Write the page.

    Args:
        path: Where to.
        script: The path of the script.
        result: Of the rehearsal.
        device: The device of each rank.
        rows: Those of the sweep; empty without one.
    """
    title = f"Rehearsal of {script}"
    kinds = kinds_of(result)
    keys = "".join(
        f'<span class="key"><i style="background:{color}"></i>{escape(kind)}</span>' for kind, color in kinds.items()
    )
    body = (
        f"<h1>{escape(title)}</h1><h2>Memory of rank {result.rank} in one step</h2><p>{keys}</p>{timeline(result, device)}"
        f"<h2>Report</h2><pre>{escape(as_text(script, result, device, rows))}</pre>"
    )
    with open(path, "w", encoding="utf-8") as file:
        file.write(
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style></head>'
            f"<body>{body}</body></html>\n"
        )


def kinds_of(result: Result) -> dict[str, str]:
    """The kinds of memory on the device, those that change least first, and their colours."""
    steady = (
        "parameters",
        "buffers",
        "optimizer state",
        "gradients",
        "communication buffers",
        "weight copies",
        "activations",
    )
    used = {kind for _, live in result.timeline for kind, num_bytes in live.items() if num_bytes and kind != HOST}
    return {kind: color for kind, color in zip(steady, COLORS, strict=True) if kind in used}


def timeline(result: Result, device: Device) -> str:
    """The memory over the operations of a step, as SVG: one area for each kind, on top of each other."""
    if not result.timeline:
        return ""
    first, last = result.timeline[0][0], result.timeline[-1][0]
    highest = max(1, result.peak_bytes)

    def x(operation: int) -> float:
        return LEFT + (WIDTH - LEFT) * (operation - first) / max(1, last - first)

    def y(num_bytes: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 10) * num_bytes / highest

    def areas() -> Iterator[str]:
        below = [0] * len(result.timeline)
        for kind, color in kinds_of(result).items():
            above = [base + live.get(kind, 0) for base, (_, live) in zip(below, result.timeline, strict=True)]
            operations = [operation for operation, _ in result.timeline]
            upper = [f"{x(operation):.1f},{y(top):.1f}" for operation, top in zip(operations, above, strict=True)]
            lower = [f"{x(operation):.1f},{y(base):.1f}" for operation, base in zip(operations, below, strict=True)]
            yield f'<polygon fill="{color}" points="{" ".join(upper + lower[::-1])}"><title>{escape(kind)}</title></polygon>'
            below = above

    lines = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y(part * highest):.1f}" y2="{y(part * highest):.1f}" stroke="#ddd"/>'
        f'<text x="{LEFT - 6}" y="{y(part * highest) + 4:.1f}" text-anchor="end" font-size="12">{size(part * highest)}</text>'
        for part in (0, 0.25, 0.5, 0.75, 1)
    )
    axis = f'<text x="{LEFT}" y="{HEIGHT - 6}" font-size="12">{last - first:,} operations: forward pass, backward pass, optimizer</text>'
    label = f"Memory over one step, at most {size(result.peak_bytes)}"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{lines}{"".join(areas())}{axis}</svg>'
