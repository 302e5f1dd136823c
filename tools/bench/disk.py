"""A model of 2 GB in 32 blocks whose weights are on disk, wholly or by half, run on the CPU.

The model lies in a safetensors file. Ours is built without memory and uses the file; the reference loads it and writes
its own copy. The floor is the same model in memory, in the same process, and for the cold cache the time to read the
file or to compute, whichever is longer. The best of several runs counts.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench.row import Row
from tools.reference import run_json

WIDTH, LAYERS, BATCH = 4096, 32, 16
BLOCK_MB = WIDTH * WIDTH * 4 / 1e6
REPEATS = 5
PIECE = 1 << 24


def rows(reference: Path) -> list[Row]:
    """Measure ours and accelerate 1.15, each beside the floor."""
    with tempfile.TemporaryDirectory(prefix="bench-disk-") as folder:
        mine, theirs = (run_json(python, __file__, folder) for python in (Path(sys.executable), reference))
    what = "forward pass on the CPU, 2 GB of weights in 32 blocks"
    ratios = [
        (f"{what}, all on disk, warm cache; floor: in memory", "warm", "warm", 1.3),
        (f"{what}, half in memory, half on disk, warm cache; floor: in memory", "half", "half", 1.2),
        (f"{what}, all on disk, cold cache; floor: reading the file, or computing", "cold", "cold", 1.15),
        ("`disk_offload` of this model in memory, which writes 2 GB; floor: raw writes", "write", "write", 1.15),
    ]
    found = [
        Row(text, "ms", mine[key][0], theirs[key][0], mine[key][1], mine[key][0] / mine[key][1], goal)
        for text, key, _, goal in ratios
    ]
    for text, key, unit, goal in (
        ("`disk_offload` of this model from its checkpoint: set-up", "setup", "ms", 50.0),
        ("bytes that this writes", "written", "MB", 0.0),
        ("anonymous memory that forward passes take", "anonymous", "MB", 2 * BLOCK_MB),
        ("`import accel_bigmodel` (1.15: all of accelerate) over torch", "import", "ms", 10.0),
    ):
        found.append(Row(text, unit, mine[key], theirs[key], 0.0, mine[key], round(goal, 1), unit))
    return found


def worker(folder: Path) -> None:
    """Measure one side."""
    import logging

    import torch
    from torch import nn

    begin = time.perf_counter()
    is_ours = import_side()
    found: dict[str, Any] = {"import": (time.perf_counter() - begin) * 1e3}
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)

    def build() -> nn.Module:
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])

    path = folder / "checkpoint" / "model.safetensors"
    write_checkpoint(build, path)
    inputs = torch.randn(BATCH, WIDTH)
    with torch.no_grad():
        found["cold"] = measure_cold(build, path, inputs, is_ours, folder)
        resident = read(build, path)
        expected = resident(inputs)
        found["write"] = measure_write(resident, folder / "spilled")
        floor = best(resident, inputs) * 1e3
        before = folder_bytes(folder)
        model, seconds = offloaded(build, path, is_ours, folder / "whole")
        found["setup"] = seconds * 1e3
        found["written"] = (folder_bytes(folder) - before) / 1e6
        anonymous = anonymous_bytes()
        assert torch.equal(model(inputs), expected)
        found["warm"] = [best(model, inputs) * 1e3, floor]
        found["anonymous"] = max(0, anonymous_bytes() - anonymous) / 1e6
        del model
        gc.collect()
        model = half_offloaded(build, path, is_ours, folder / "half")
        assert torch.equal(model(inputs), expected)
        found["half"] = [best(model, inputs) * 1e3, floor]
    print(json.dumps(found))


def import_side() -> bool:
    """Import what is measured; True when it is ours."""
    try:
        import accel_bigmodel  # noqa: F401
    except ImportError:
        import accelerate  # noqa: F401

        return False
    return True


def write_checkpoint(build: Callable[[], Any], path: Path) -> None:
    """A safetensors file, safe on the disk."""
    from safetensors.torch import save_file

    if not path.exists():
        path.parent.mkdir(parents=True)
        save_file(build().state_dict(), path, metadata={"format": "pt"})
        os.sync()


def read(build: Callable[[], Any], path: Path) -> Any:
    """The model in memory of its own."""
    from safetensors.torch import load_file

    model = build()
    model.load_state_dict(load_file(path))
    return model


def offloaded(build: Callable[[], Any], path: Path, is_ours: bool, folder: Path) -> tuple[Any, float]:
    """The model with all weights on disk, and how long that took."""
    from accelerate import disk_offload, init_empty_weights, load_checkpoint_in_model

    with init_empty_weights():
        model = build()
    begin = time.perf_counter()
    if is_ours:
        disk_offload(model, path.parent, "cpu")
    else:
        model = build()
        load_checkpoint_in_model(model, str(path))
        disk_offload(model, str(folder), "cpu")
    return model, time.perf_counter() - begin


def half_offloaded(build: Callable[[], Any], path: Path, is_ours: bool, folder: Path) -> Any:
    """The model with every second block on disk."""
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    with init_empty_weights():
        model = build()
    places = {str(index): "disk" if index % 2 else "cpu" for index in range(LAYERS)}
    return load_checkpoint_and_dispatch(model, str(path), device_map=places, offload_folder=str(folder))


def measure_cold(build: Callable[[], Any], path: Path, inputs: Any, is_ours: bool, folder: Path) -> list[float]:
    """A first forward pass with nothing in the page cache, beside the longer of reading and computing; in ms."""
    resident = build()
    taken, floors = [], []
    for attempt in range(REPEATS):
        model, _ = offloaded(build, path, is_ours, folder / f"cold-{attempt}")
        written = folder / f"cold-{attempt}"
        evict(path, *written.glob("*.dat"))
        taken.append(seconds_of(model, inputs))
        del model
        gc.collect()
        subprocess.run(["rm", "-rf", str(written)], check=True)
        evict(path)
        floors.append(max(seconds_of(read_raw, path), seconds_of(resident, inputs)))
    return [min(taken) * 1e3, min(floors) * 1e3]


def measure_write(resident: Any, folder: Path) -> list[float]:
    """Offloading a model in memory into an empty folder, beside writing its weights by hand; in ms.

    By turns, and nothing maps what was written when the next one begins: pages that were just freed are supplied faster.
    """
    from torch import nn

    from accelerate import disk_offload, init_empty_weights

    def write_raw() -> None:
        folder.mkdir()
        for name, weight in resident.state_dict().items():
            with open(folder / f"{name}.raw", "wb") as file:
                file.write(weight.numpy())

    def offload() -> None:
        with init_empty_weights():
            model = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(LAYERS)])
        for layer, held in zip(model, resident, strict=True):
            layer.weight = held.weight
        disk_offload(model, str(folder), "cpu")

    taken: list[list[float]] = [[], []]
    for _ in range(REPEATS):
        for side, write in enumerate((offload, write_raw)):
            taken[side].append(seconds_of(write) * 1e3)
            gc.collect()
            shutil.rmtree(folder)
    return [min(side) for side in taken]


def evict(*paths: Path) -> None:
    """Drop files from the page cache; nobody may have touched a map of them."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def read_raw(path: Path) -> None:
    """Read a file in large pieces."""
    buffer = bytearray(PIECE)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def folder_bytes(folder: Path) -> int:
    """What the files below a folder take."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def seconds_of(function: Callable[..., object], *arguments: Any) -> float:
    """How long a call takes."""
    begin = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begin


def best(function: Callable[..., object], *arguments: Any) -> float:
    """The shortest of several runs, in seconds."""
    return min(seconds_of(function, *arguments) for _ in range(REPEATS))


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
