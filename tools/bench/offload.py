"""Models in parts, on one process: what hooks cost, and planning."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tools.bench.row import Row
from tools.reference import run_json

TINY = 500
BLOCKS = 300
REPEATS = 7


def rows(reference: Path) -> list[Row]:
    """Measure ours and the reference, each against the same model without hooks beside it."""
    mine, theirs = run_json(sys.executable, __file__), run_json(reference, __file__)
    tiny, plan = "tiny", "plan"
    return [
        Row(
            f"`cpu_offload` of {TINY} tiny modules, added per module and call",
            "us", mine[tiny], theirs[tiny], 0.0, mine[tiny], 15, "us",
        ),
        Row(
            f"`infer_auto_device_map` of {mine['modules']:,} modules, tied",
            "ms", mine[plan], theirs[plan], None, mine[plan], 25, "ms",
        ),
    ]  # fmt: skip


def worker() -> None:
    """Measure one side."""
    import logging

    import torch
    from torch import nn

    from accelerate import cpu_offload, infer_auto_device_map

    logging.disable(logging.WARNING)  # there are no accelerators here to plan for
    torch.set_num_threads(1)
    found: dict[str, object] = {}
    with torch.no_grad():
        tiny, one = nn.Sequential(*[nn.Linear(4, 4) for _ in range(TINY)]), torch.randn(1, 4)
        plain = best(lambda: tiny(one))
        cpu_offload(tiny, "cpu")
        found["tiny"] = (best(lambda: tiny(one)) - plain) / TINY * 1e6
    with torch.device("meta"):
        blocks = [
            nn.ModuleDict({**{name: nn.Linear(64, 64) for name in "qkvo"}, "mlp": nn.Sequential(*layers())})
            for _ in range(BLOCKS)
        ]
        model = nn.ModuleDict({"emb": nn.Embedding(100, 64), "blocks": nn.ModuleList(blocks)})
        model["head"] = nn.Linear(64, 100, bias=False)
        model["head"].weight = model["emb"].weight
    found["modules"] = sum(1 for _ in model.modules())
    total = sum(parameter.numel() * 4 for parameter in model.parameters())
    limits = {0: total // 3, 1: total // 3, "cpu": total}
    found["plan"] = best(lambda: infer_auto_device_map(model, max_memory=limits)) * 1e3
    print(json.dumps(found))


def layers() -> list[object]:
    """The layers of a block's second half."""
    from torch import nn

    return [nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.LayerNorm(64)]


def best(function: Callable[[], object]) -> float:
    """The shortest of several runs, in seconds."""
    taken = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        function()
        taken.append(time.perf_counter() - begin)
    return min(taken)


if __name__ == "__main__":
    worker()
