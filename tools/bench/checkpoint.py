"""Checkpoints: `save_state` and `load_state` over the raw calls that move the same bytes, and how long training waits.

The floor saves with `safetensors.torch.save_file` and `torch.save` and waits for the disk file by file; it loads into a
model and an optimizer without verifying anything. It runs in the same process as what is compared with it, by turns, and
the best of several counts on both sides: the system's supply of pages makes two modes. States are of 400 MB, and of 1.2 GB
where they are saved in the background: the floor is then a copy of all tensors into memory that exists. The allocator is told to give
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
BACKGROUND_TITLES = (
    "`save_state(async_save=True)`, 1.2 GB: until training continues (1.15: `save_state`; floor: a copy)",
    "the 20 training steps beside it (floor: without it)",
)
BACKGROUND_LAYERS, BACKGROUND_ROUNDS, NUM_STEPS = 48, 6, 20


def rows(reference: Path) -> list[Row]:
    """Measure ours and accelerate 1.15, each beside the floor."""
    return [*rows_of_calls(reference), *rows_of_background(reference)]


def rows_of_background(reference: Path) -> list[Row]:
    """How long training waits for a save in the background, and how much slower the steps beside it are."""
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as folder:
        mine, theirs = (
            run_json(python, __file__, str(Path(folder, side)), "background")
            for side, python in (("ours", Path(sys.executable)), ("theirs", reference))
        )
    ours, copied = mine["blocked"], mine["copy"]
    beside, before = mine["beside"], mine["before"]
    waits, slows = BACKGROUND_TITLES
    return [
        Row(waits, "ms", ours, theirs["blocked"], copied, ours / copied, 2.0),
        Row(slows, "ms", beside, None, before, beside / before, 1.1),
    ]


def rows_of_calls(reference: Path) -> list[Row]:
    """How long a save and a load take."""
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


def background_worker(folder: Path) -> None:
    """One process: save a training state, and where that goes on in the background, train a smaller model beside it."""
    import torch
    from torch import nn

    from accelerate import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BACKGROUND_LAYERS)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    states = [*model.state_dict().values(), *(one for of in optimizer.state.values() for one in of.values())]
    copies = [torch.empty_like(one) for one in states]
    small = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    small_optimizer = torch.optim.AdamW(small.parameters())
    batch = torch.randn(64, WIDTH)

    def copy() -> None:
        for target, source in zip(copies, states, strict=True):
            target.copy_(source.detach())

    def train() -> None:
        for _ in range(NUM_STEPS):
            small(batch).square().mean().backward()
            small_optimizer.step()
            small_optimizer.zero_grad()

    has_background = hasattr(accelerator, "engine")  # 1.15 has none
    options = {"async_save": True} if has_background else {}
    best: dict[str, float] = {}
    for number in range(BACKGROUND_ROUNDS):
        found = {"copy": seconds_of(copy), "before": seconds_of(train)}
        found["blocked"] = seconds_of(lambda: accelerator.save_state(str(folder), **options))
        if has_background:
            found["beside"] = seconds_of(train)
            accelerator._checkpoints._saves.has_failed()  # waits
        if number:  # the first one gets its memory
            best = {name: min(best.get(name, float("inf")), seconds * 1e3) for name, seconds in found.items()}
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
    if len(sys.argv) == 1:
        main()
    else:
        (background_worker if sys.argv[2:] else worker)(Path(sys.argv[1]))
