"""A rehearsal as text, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape

from accel_cli.rehearse.devices import Device
from accel_cli.rehearse.result import HOST, RESERVE, Exchange, Result
from accel_cli.rehearse.sweep import SweepRow
from accel_cli.rehearse.times import ASSUMPTIONS, seconds_of, step_time

WIDTH = 26
OUTSIDE = "outside of modules, and the backward pass"


def as_text(script: str, result: Result, device: Device, rows: Sequence[SweepRow] = ()) -> str:
    """The report for a terminal.

    Args:
        script: Its path.
        result: Of the rehearsal.
        device: The device of each rank.
        rows: Those of the sweep; empty without one.
    """
    machines = f" on {result.machines} machines" if result.machines > 1 else ""
    head = f"{script}: rank {result.rank} of {result.world_size}{machines}, {device.name}, step {result.steps}"
    sections = [
        _memory(result, device),
        _communication(result, device),
        _time(result, device),
        result.notes,
        _advice(rows),
    ]
    return "\n\n".join([head, *("\n".join(lines) for lines in map(list, sections) if lines)])


def as_json(result: Result, device: Device, rows: Sequence[SweepRow] = ()) -> str:
    """The report as JSON."""
    time = step_time(result, device)
    return json.dumps(
        {
            "device": device.name,
            "peak_bytes": result.peak_bytes,
            "step_seconds": time.total,
            "mfu": time.mfu,
            **result.as_dict(),
            "sweep": [row.as_dict() for row in rows],
        }
    )


def size(num_bytes: float) -> str:
    """Bytes in the unit that suits them, as powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TiB"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def fits(result: Result, device: Device) -> bool:
    """Whether the peak fits the device, with the reserve."""
    return not device.memory_bytes or result.peak_bytes <= device.memory_bytes * (1 - RESERVE)


def _memory(result: Result, device: Device) -> Iterator[str]:
    yield f"memory at the peak{size(result.peak_bytes):>26}"
    kinds = sorted(result.at_peak.items(), key=lambda item: -item[1])
    yield from (f"  {kind:<{WIDTH}}{size(n):>16}" for kind, n in kinds if n and kind != HOST)
    if device.memory_bytes:
        word = "fits" if fits(result, device) else "does not fit"
        yield f"  {word} {size(device.memory_bytes)}, of which {RESERVE:.0%} are left for the context and fragmentation"
    if result.largest_batch is not None:
        largest = f"the largest batch of a rank that fits is {result.largest_batch}"
        yield f"  {largest if result.largest_batch else 'not even a batch of 1 fits'}"
    if result.by_module:
        yield "  alive at the peak, by the module that holds or allocated it:"
        yield from (f"    {name or OUTSIDE:<44}{size(n):>16}" for name, n in list(result.by_module.items())[:6])


def _communication(result: Result, device: Device) -> Iterator[str]:
    if not result.exchanges:
        return
    yield f"{'communication of a step':<{WIDTH}}{'group':<14}{'ranks':>6}{'count':>7}{'bytes of all':>16}{'time':>12}"
    rows: dict[tuple[str, str, int, bool], list[Exchange]] = {}
    for exchange in result.exchanges:
        rows.setdefault((exchange.name, exchange.group, exchange.num_ranks, exchange.between_machines), []).append(
            exchange
        )
    for (name, group, num_ranks, is_between), exchanges in rows.items():
        seconds = sum(seconds_of(exchange, device) for exchange in exchanges)
        num_bytes = sum(exchange.count * exchange.num_bytes for exchange in exchanges)
        yield (
            f"  {name:<{WIDTH - 2}}{group:<14}{num_ranks:>6}{sum(exchange.count for exchange in exchanges):>7}"
            f"{size(num_bytes):>16}{duration(seconds):>12}  {'between machines' if is_between else 'within a machine'}"
        )


def _time(result: Result, device: Device) -> Iterator[str]:
    time = step_time(result, device)
    yield f"time of a step{duration(time.total):>30}  (no less than {duration(result.shortest_seconds)}, FLOPs over the peak)"
    for title, seconds in (
        ("computing", time.computing),
        ("communication beside it", time.in_background),
        ("communication it waits for", time.waited_for),
    ):
        yield f"  {title:<{WIDTH}}{duration(seconds):>16}"
    yield f"  {result.flops:.3g} FLOPs, MFU {time.mfu:.1%}"
    if result.batch and time.total:
        samples = result.batch[0] * result.num_batches * result.data_ranks
        tokens = f", {samples * result.batch[1] / time.total:,.0f} tokens/s" if len(result.batch) == 2 else ""
        yield f"  {samples / time.total:,.0f} samples/s of all ranks{tokens}"
    yield ASSUMPTIONS


def _advice(rows: Sequence[SweepRow]) -> Iterator[str]:
    if not rows:
        return
    yield f"{'advice':<34}{'peak':>14}{'step':>12}{'samples/s':>12}  flags"
    for row in rows:
        if row.reason:
            yield f"  {row.title:<32}{row.reason}"
        else:
            yield f"  {row.title:<32}{size(row.peak_bytes):>14}{duration(row.seconds):>12}{row.samples:>12,.0f}  {row.flags}"


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


def write_page(path: str, script: str, result: Result, device: Device, rows: Sequence[SweepRow] = ()) -> None:
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
