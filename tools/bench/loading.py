"""Loading a 4 GB checkpoint of float16 shards from the page cache into a model without memory.

The floor is `safetensors.torch.load_file` of each shard, and `load_state_dict(assign=True)`. It runs in the same process
as what is compared with it, by turns, and the best of several times counts. The first touch reads every byte once.
Anonymous memory is what the process took besides the mapped files, at its worst.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench.row import Row
from tools.reference import run_json

PAIRS = 5
WIDTH, LAYERS, SHARDS = 5632, 64, 8  # 4.06 GB
TITLES = {
    "returns": ("`load_checkpoint_in_model`, 4 GB of float16 in 8 shards, to CPU: returns", "ms", 2.0),
    "touched": ("the same, and every byte is touched once", "ms", 1.15),
}


def rows(reference: Path) -> list[Row]:
    """Measure ours and accelerate 1.15, each beside the floor."""
    with tempfile.TemporaryDirectory(prefix="bench-loading-") as folder:
        write_checkpoint(Path(folder))
        mine, theirs = (run_json(python, __file__, folder) for python in (Path(sys.executable), reference))
    measured = [
        Row(what, unit, ours, theirs[key]["library"], floor, ours / floor, goal)
        for key, (what, unit, goal) in TITLES.items()
        for ours, floor in [(mine[key]["library"], mine[key]["floor"])]
    ]
    took = mine["anonymous"]
    return [
        *measured,
        Row(
            "anonymous memory that it takes",
            "MB",
            took["library"],
            theirs["anonymous"]["library"],
            took["floor"],
            took["library"],
            64,
            result_unit="MB",
        ),  # fmt: skip
    ]


def write_checkpoint(folder: Path) -> None:
    """Shards of random weights, with an index."""
    import torch
    from safetensors.torch import save_file

    weight = torch.randn(WIDTH, WIDTH).half()
    bias = torch.randn(WIDTH).half()
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        layers = range(shard * LAYERS // SHARDS, (shard + 1) * LAYERS // SHARDS)
        tensors = {f"{i}.weight": weight.clone() for i in layers} | {f"{i}.bias": bias.clone() for i in layers}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def worker(folder: Path) -> None:
    """One process: load many times, by hand and with the library in turn."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    sides = {"floor": load_by_hand, "library": library()}
    best: dict[str, dict[str, float]] = {key: dict.fromkeys(sides, float("inf")) for key in TITLES}
    most = dict.fromkeys(sides, 0.0)
    for _ in range(PAIRS):
        for side, load in sides.items():
            with torch.device("meta"):
                model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).half()
            gc.collect()
            before, begin = anonymous_bytes(), time.perf_counter()
            load(model, folder)
            returned = time.perf_counter() - begin
            for parameter in model.parameters():
                parameter.detach().view(torch.int64).sum()
            touched = time.perf_counter() - begin
            most[side] = max(most[side], (anonymous_bytes() - before) / 1e6)
            for key, value in {"returns": returned * 1e3, "touched": touched * 1e3}.items():
                best[key][side] = min(best[key][side], value)
            del model
    print(json.dumps({**best, "anonymous": most}))


def library() -> Callable[[Any, Path], Any]:
    """Loading with accelerate, ours or 1.15."""
    try:
        module = importlib.import_module("accel_bigmodel.weights.load")
    except ImportError:
        module = importlib.import_module("accelerate")
    load = module.load_checkpoint_in_model
    return lambda model, folder: load(model, str(folder), device_map={"": "cpu"})


def load_by_hand(model: Any, folder: Path) -> None:
    """The floor."""
    from safetensors.torch import load_file

    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name in dict.fromkeys(weight_map.values()):
        model.load_state_dict(load_file(folder / name), strict=False, assign=True)


def anonymous_bytes() -> int:
    """Memory of this process that is not a mapped file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10


def main() -> None:
    """Measure and print."""
    from tools.bench.row import table
    from tools.reference import reference_python

    print(table(rows(reference_python())))


if __name__ == "__main__":
    worker(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
