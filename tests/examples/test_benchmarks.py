"""The programs of `benchmarks/fp8`: the curve of a prepared model is that of torchao by hand."""

from __future__ import annotations

import sys

import pytest

from tools.reference import ROOT, run_on_ranks

pytestmark = [pytest.mark.thorough, pytest.mark.takes_turns]


@pytest.mark.parametrize(
    ("program", "world", "words"),
    [("non_distributed", 1, ()), ("ddp", 2, ()), ("fsdp", 2, ()), ("distrib_deepspeed", 2, ("3",))],
)
def test_fp8_curves(program: str, world: int, words: tuple[str, ...]) -> None:
    pytest.importorskip("torchao")
    curves = run_on_ranks(sys.executable, ROOT / f"benchmarks/fp8/torchao/{program}.py", world, words)
    assert curves["fp8"] == pytest.approx(curves["hand"], rel=1e-5)
    assert curves["fp8"] != curves["bf16"]
    last, first = (sum(curves["fp8"][part]) for part in (slice(-10, None), slice(10)))
    assert last < first / 1.3
