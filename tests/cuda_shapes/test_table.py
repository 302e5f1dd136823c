"""Every engine and kind of parallelism on 1, 2, 8 and 64 GPUs that do not exist, one cell for each thing it does.

A row is prepared once, as rank 0 of so many processes, in a fork of a process whose CUDA driver is a pretended one: torch's
own CUDA code, allocator, streams, DDP and FSDP run, kernels are computed by the CPU, other ranks are equal to this one (see
the package's modules). A cell fails on a hidden wait of the host for the device, on a collective of a tensor that the
group's backend does not serve (torch says so), on memory beyond a multiple of the model, and on a context on another GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cuda_shapes.driver import GpuMachine, missing
from tests.cuda_shapes.limits import KNOWN, MAX_WAITS, excess_bytes, local_rank_of, remaining_bytes, waits_of
from tests.cuda_shapes.rows import ROWS

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
QUICK = {("fsdp2", 8)}
COLUMNS = (
    "prepare", "warm_up", "step", "batches", "evaluate", "gather_scalar", "gather_for_metrics", "gather_large",
    "gather_nested", "reduce_scalar", "reduce_many", "broadcast", "pad_across_processes", "gather_object", "get_state_dict",
    "save_model", "save_state", "load_state", "free_memory",
)  # fmt: skip


def cells() -> Iterator[Any]:
    for name, row in ROWS.items():
        for world in row.worlds:
            for column in COLUMNS:
                if column in row.skipped:
                    continue
                marks = [] if (name, world) in QUICK else [pytest.mark.thorough]
                reason = next((why for applies, why in KNOWN if applies(name, world, column)), None)
                if reason is not None:
                    marks.append(pytest.mark.xfail(strict=True, reason=reason))
                yield pytest.param(name, world, column, marks=marks, id=f"{name}-{world}-{column}")


@pytest.mark.parametrize(("name", "world", "column"), list(cells()))
def test_cell(machine: GpuMachine, name: str, world: int, column: str) -> None:
    reports = machine.run("columns", "run_row", name, world)
    problem = found_wrong(name, world, column, reports)
    if problem:
        pytest.fail(problem, pytrace=False)


def found_wrong(name: str, world: int, column: str, reports: dict[str, Any]) -> str | None:
    """What is wrong with a cell, in words."""
    if isinstance(reports.get("error"), str):
        return str(reports["error"])
    report = reports[column]
    if report["error"] is not None:
        return str(report["error"])
    if report["contexts"] not in ([], [local_rank_of(world)]):
        return f"contexts on GPUs {report['contexts']}, of which {local_rank_of(world)} is this process's"
    waits = waits_of(name, column, report)
    allowed = MAX_WAITS.get((name, column), MAX_WAITS.get(column, 0))
    if len(waits) > allowed:
        return "\n".join([f"the host waits {len(waits)} times, not {allowed}:", *waits])
    if column == "free_memory" and (remaining := remaining_bytes(report)) > 0:
        return f"{remaining} bytes of what was freed stay on the GPU"
    over = excess_bytes(name, world, column, report)
    return f"{report['peak_bytes']} bytes at the peak: {over} too many" if over > 0 else None
