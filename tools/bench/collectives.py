"""Collectives on two gloo ranks: ours, accelerate 1.15's and the raw floor, in interleaved blocks."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench.row import Row
from tools.reference import ROOT, run_on_ranks

BLOCKS = 40
GOALS = {
    # what: (goal, calls in a block)
    "`gather` of 64 leaves of 16 floats": (1.2, 10),
    "`reduce` of 64 leaves of 16 floats": (1.3, 10),
    "`pad_across_processes` + `gather` of 16 ragged leaves": (2.0, 10),
    "`gather` of the same ragged leaves, unpadded": (1.3, 10),
    "`gather` of one 4 MB tensor": (1.1, 4),
    "`gather_for_metrics` of a batch": (1.2, 10),
    "`broadcast_object_list` of three small objects": (1.2, 10),
}
RAGGED_ONLY_OURS = "`gather` of the same ragged leaves, unpadded"


def rows(reference: Path) -> list[Row]:
    """Measure both sides, each against the floor beside it."""
    mine, theirs = run_on_ranks(sys.executable, __file__), run_on_ranks(reference, __file__)
    return [
        Row(
            what,
            "ms",
            mine[what][0],
            theirs[what][0] if what in theirs else None,
            mine[what][1],
            mine[what][2],
            goal,
        )
        for what, (goal, _) in GOALS.items()
    ]


def worker() -> None:
    """One rank."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    from accelerate import Accelerator
    from accelerate.utils import broadcast_object_list

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    rank, world = accelerator.process_index, accelerator.num_processes
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    ours = Path(sys.modules["accelerate"].__file__ or "").is_relative_to(ROOT / "packages")

    def flat_gather(flat: Any) -> Any:
        out = flat.new_empty(world * flat.numel())
        all_gather(out, flat)
        return out

    leaves = [torch.randn(16) for _ in range(64)]

    def gather_floor() -> Any:
        rows = flat_gather(torch.cat(leaves)).view(world, -1)
        return [part.reshape(-1) for part in rows.split(16, dim=1)]

    def reduce_floor() -> Any:
        flat = torch.cat(leaves)
        dist.all_reduce(flat)
        return flat.split(16)

    ragged = [torch.randn(8 + rank + index % 3, 4) for index in range(16)]
    longest = sum(8 + 1 + index % 3 for index in range(16)) * 4

    def ragged_floor() -> Any:  # all sizes are known beforehand
        flat = torch.cat([leaf.reshape(-1) for leaf in ragged])
        rows = flat_gather(torch.nn.functional.pad(flat, (0, longest - flat.numel()))).view(world, -1)
        per_rank = [
            row.split([4 * (8 + source + index % 3) for index in range(16)] + [4 * 16 * (world - 1 - source)])
            for source, row in enumerate(rows)
        ]
        return [torch.cat([parts[index] for parts in per_rank]).view(-1, 4) for index in range(16)]

    big = torch.randn(1 << 20)
    batch = (torch.randint(10, (32,)), torch.randint(10, (32,)))
    loader = accelerator.prepare(DataLoader(list(range(4096)), batch_size=32))
    iterator = iter(loader)
    next(iterator)  # inside a loader, as in an evaluation loop

    def metrics_floor() -> Any:
        rows = flat_gather(torch.cat(batch)).view(world, -1)
        return [part.reshape(-1) for part in rows.split(32, dim=1)]

    objects = [{"epoch": 3, "path": "runs/best"}, ["a", "b"], 0.25]

    def objects_floor() -> Any:
        found = list(objects)
        dist.broadcast_object_list(found, src=0)
        return found

    cases: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "`gather` of 64 leaves of 16 floats": (lambda: accelerator.gather(leaves), gather_floor),
        "`reduce` of 64 leaves of 16 floats": (lambda: accelerator.reduce(leaves), reduce_floor),
        "`pad_across_processes` + `gather` of 16 ragged leaves": (
            lambda: accelerator.gather(accelerator.pad_across_processes(ragged)),
            ragged_floor,
        ),
        "`gather` of one 4 MB tensor": (lambda: accelerator.gather(big), lambda: flat_gather(big)),
        "`gather_for_metrics` of a batch": (lambda: accelerator.gather_for_metrics(batch), metrics_floor),
        "`broadcast_object_list` of three small objects": (
            lambda: broadcast_object_list(list(objects)),
            objects_floor,
        ),
    }
    if ours:
        cases[RAGGED_ONLY_OURS] = (lambda: accelerator.gather(ragged), ragged_floor)
    found = {what: by_turns(pair, GOALS[what][1], dist.barrier) for what, pair in cases.items()}
    if rank == 0:
        print(json.dumps(found), flush=True)
    accelerator.wait_for_everyone()
    del iterator


def by_turns(pair: tuple[Callable[[], Any], Callable[[], Any]], calls: int, barrier: Callable[[], Any]) -> list[float]:
    """Run two functions in blocks, taken alternately.

    Returns:
        The median milliseconds of a call of each, and the median over pairs of neighbouring blocks of their ratio: the
        system schedules two waiting processes now well, now badly, and neighbours share that.
    """
    pairs = []
    for block in range(BLOCKS + 2):
        seconds = [0.0, 0.0]
        for index in (0, 1) if block % 2 else (1, 0):
            barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                pair[index]()
            seconds[index] = (time.perf_counter() - begin) / calls
        if block >= 2:  # the first ones warm up
            pairs.append(seconds)
    first, second = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    return [first, second, statistics.median(one / other for one, other in pairs)]


if __name__ == "__main__":
    worker()
