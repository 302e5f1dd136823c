"""Models in parts, on one process: what hooks cost, building on the meta device, and planning."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tools.bench.row import Row
from tools.reference import run_json

TINY = 500
BLOCKS = 300
REPEATS = 7
BUILT = {"encoder": "an encoder of 24 layers, 1024 wide", "linear": "100 linear layers of 4096 x 4096"}
BUILDS = 40


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
        *(
            Row(f"`init_empty_weights` over `torch.device('meta')`: {what}", "x", mine[key], theirs[key], 1.0, mine[key], 1.05)
            for key, what in BUILT.items()
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
    found |= {key: median_ratio_of_builds(key) for key in BUILT}
    found["plan"] = best(lambda: infer_auto_device_map(model, max_memory=limits)) * 1e3
    print(json.dumps(found))


def median_ratio_of_builds(what: str) -> float:
    """Time to build a model under `init_empty_weights` over that under `torch.device("meta")`: median of pairs."""
    import torch
    from torch import nn

    from accelerate import init_empty_weights

    def build() -> object:
        if what == "linear":
            return nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(100)])
        return [nn.TransformerEncoderLayer(1024, 16, 4096) for _ in range(24)]

    ratios = []
    for _ in range(BUILDS):
        begin = time.perf_counter()
        with init_empty_weights():
            build()
        middle = time.perf_counter()
        with torch.device("meta"):
            build()
        ratios.append((middle - begin) / (time.perf_counter() - middle))
    return statistics.median(ratios)


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
