"""Checkpoints of a 400 MB training state: `save_state` and `load_state` over the raw calls that move the same bytes.

The floor saves with `safetensors.torch.save_file` and `torch.save` and waits for the disk file by file; it loads into a
model and an optimizer without verifying anything. It runs in the same process as what is compared with it, by turns, and
the best of several counts on both sides: the system's supply of pages makes two modes. The allocator is told to give
large blocks back, so that every load gets memory that it never used before, as the one load after a restart does.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench.row import Row
from tools.reference import run_json

PAIRS = 15
WIDTH, LAYERS = 1440, 16  # 133 MB of weights, 266 MB of AdamW's moments
NEW_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": "0"}
TITLES = {
    "save": ("`save_state`, 400 MB, with fsync, manifest and checksums (1.15: none of them)", 1.1),
    "load": ("`load_state`, 400 MB, verified (1.15: unverified)", 1.3),
}


def rows(reference: Path) -> list[Row]:
    """Measure ours and accelerate 1.15, each beside the floor."""
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as folder:
        mine, theirs = (
            run_json(python, __file__, str(Path(folder, side)), **NEW_MEMORY)
            for side, python in (("ours", Path(sys.executable)), ("theirs", reference))
        )
    return [
        Row(what, "ms", ours, theirs[action]["accelerator"], floor, ours / floor, goal)
        for action, (what, goal) in TITLES.items()
        for ours, floor in [(mine[action]["accelerator"], mine[action]["floor"])]
    ]


def worker(folder: Path) -> None:
    """One process: save and load a training state many times, by hand and with the accelerator in turn."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    sides = {
        "floor": floor_actions(model, optimizer, folder),
        "accelerator": accelerator_actions(model, optimizer, folder),
    }
    best: dict[str, dict[str, float]] = {action: dict.fromkeys(sides, float("inf")) for action in TITLES}
    for _ in range(PAIRS):
        for side, actions in sides.items():
            shutil.rmtree(folder, ignore_errors=True)
            for action, work in actions.items():
                best[action][side] = min(best[action][side], seconds_of(work) * 1e3)
    print(json.dumps(best))


def seconds_of(work: Callable[[], Any]) -> float:
    """How long it takes once."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def accelerator_actions(model: Any, optimizer: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """What an accelerator does, ours or 1.15's."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    return {"save": lambda: accelerator.save_state(str(folder)), "load": lambda: accelerator.load_state(str(folder))}


def floor_actions(model: Any, optimizer: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """The same by hand."""
    import os

    import torch
    from safetensors.torch import load_file, save_file

    weights, moments = folder / "model.safetensors", folder / "optimizer.bin"

    def sync(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def save() -> None:
        folder.mkdir()
        save_file(model.state_dict(), weights, metadata={"format": "pt"})
        sync(weights)
        torch.save(optimizer.state_dict(), moments)
        sync(moments)
        sync(folder)

    def load() -> None:
        model.load_state_dict(load_file(weights))
        optimizer.load_state_dict(torch.load(moments, weights_only=True, map_location="cpu"))  # noqa: TID251

    return {"save": save, "load": load}


def main() -> None:
    """Measure and print."""
    from tools.bench.row import table
    from tools.reference import reference_python

    print(table(rows(reference_python())))


if __name__ == "__main__":
    worker(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
