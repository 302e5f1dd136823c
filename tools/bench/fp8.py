"""Loss curves of training in FP8, by the programs of `benchmarks/fp8`; accelerate 1.15 does not train in FP8 on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.bench.row import Row
from tools.reference import ROOT, run_on_ranks

PROGRAMS = ROOT / "benchmarks" / "fp8" / "torchao"
CASES = {
    "alone": ("non_distributed.py", 1),
    "DDP, 2 ranks": ("ddp.py", 2),
    "FSDP 2, 2 ranks": ("fsdp.py", 2),
    "ZeRO 2, 2 ranks": ("distrib_deepspeed.py", 2),
}
LAST = 10  # steps whose mean loss is compared
APART, WORSE = 1e-5, 1.1  # the goals: a curve beside that by hand, and the last losses beside those of bfloat16


def rows(reference: Path) -> list[Row]:
    """Measure ours beside plain torchao."""
    figures = []
    for case, (program, world) in CASES.items():
        curves = run_on_ranks(sys.executable, PROGRAMS / program, world=world)
        hand, ours, bf16 = curves["hand"], curves["fp8"], curves["bf16"]
        apart = max(abs(one - other) / other for one, other in zip(ours, hand, strict=True))
        figures.append(Row(f"FP8 loss curve off that of torchao by hand: {case}", "x", apart, None, 0.0, apart, APART))
        ends = [sum(curve[-LAST:]) / LAST for curve in (ours, hand, bf16)]
        what = f"FP8 loss of the last {LAST} of {len(ours)} steps, over bf16's: {case}"
        figures.append(Row(what, "", ends[0], None, ends[1], ends[0] / ends[2], WORSE))
    return figures
