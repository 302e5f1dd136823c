"""Building a model without memory: `init_empty_weights` over `torch.device("meta")`, taken by turns in one process."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench.row import Row, table
from tools.reference import reference_python, run_json

PAIRS = 60
GOAL = 1.05
MODELS = {
    "encoder of 12 layers": "encoder",
    "100 layers of 4096 x 4096": "wide",
}


def rows(reference: Path) -> list[Row]:
    """Measure ours and accelerate 1.15, each beside the floor."""
    mine, theirs = (run_json(python, __file__, "--worker") for python in (Path(sys.executable), reference))
    return [
        Row(
            f"`init_empty_weights`, {what}; floor: `torch.device('meta')`",
            "ms",
            mine[key]["library"],
            theirs[key]["library"],
            mine[key]["floor"],
            mine[key]["ratio"],
            GOAL,
        )
        for what, key in MODELS.items()
    ]


def worker() -> None:
    """Build each model many times, on both sides by turns."""
    import torch
    from torch import nn

    from accelerate import init_empty_weights

    torch.set_num_threads(1)
    builders: dict[str, Callable[[], nn.Module]] = {
        "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(768, 12, 3072), 12),
        "wide": lambda: nn.ModuleList(nn.Linear(4096, 4096) for _ in range(100)),
    }
    found = {}
    for key, build in builders.items():
        pairs = []
        for pair in range(PAIRS):
            seconds = {}
            for side in ("floor", "library")[:: 1 if pair % 2 else -1]:
                place: Any = torch.device("meta") if side == "floor" else init_empty_weights()
                begin = time.perf_counter()
                with place:
                    build()
                seconds[side] = time.perf_counter() - begin
            pairs.append(seconds)
        found[key] = {side: statistics.median(one[side] for one in pairs) * 1e3 for side in ("floor", "library")}
        found[key]["ratio"] = statistics.median(one["library"] / one["floor"] for one in pairs)
    print(json.dumps(found))


if __name__ == "__main__":
    worker() if "--worker" in sys.argv else print(table(rows(reference_python())))
