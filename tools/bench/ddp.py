"""DDP throughput: a hand-written loop over a prepared one, in the same two processes, in interleaved pairs.

The thread that watches ranks runs beside both; its CPU time is all that it can take from a step.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench.row import Row
from tools.reference import run_on_ranks

PAIRS = 40
STEPS = 50
BATCH = 32
WIDTHS = {"tiny model": 32, "small model": 512}


def rows(reference: Path) -> list[Row]:
    """Measure our prepared loop and the reference's, each against the hand-written loop beside it."""
    mine, theirs = run_on_ranks(sys.executable, __file__), run_on_ranks(reference, __file__)
    found = []
    for what in WIDTHS:
        ratio, other = mine[what]["ratio"], theirs[what]["ratio"]
        found.append(
            Row(f"DDP samples/s, hand-written over prepared, 2 ranks, {what}", "x", ratio, other, 1.0, ratio, 1.03)
        )
    share = mine["watcher"]["percent"]
    found.append(
        Row("DDP, tiny model: CPU time of the thread that watches ranks", "%", share, None, 0.0, share, 2.0, "%")
    )
    return found


def worker() -> None:
    """One rank: time both loops by turns and let rank 0 print the medians."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from accelerate import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    found = {}
    for what, width in WIDTHS.items():
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(STEPS * BATCH * 2, width), torch.randn(STEPS * BATCH * 2, width))

        def make(width: int = width) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            return model, torch.optim.SGD(model.parameters(), lr=1e-3)

        plain, plain_optimizer = make()
        plain = DistributedDataParallel(plain)
        plain_loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=True))
        model, optimizer = make()
        loader = DataLoader(data, batch_size=BATCH, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

        def hand_written(model: Any = plain, optimizer: Any = plain_optimizer, loader: Any = plain_loader) -> None:
            for inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        def prepared(model: Any = model, optimizer: Any = optimizer, loader: Any = loader) -> None:
            for inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

        began, before = time.perf_counter(), watcher_seconds()
        found[what] = compare(hand_written, prepared)
        share = (watcher_seconds() - before) / (time.perf_counter() - began)
        found.setdefault("watcher", {"percent": share * 100})
    if accelerator.is_main_process:
        print(json.dumps(found), flush=True)
    accelerator.wait_for_everyone()


def watcher_seconds() -> float:
    """The CPU time that the thread that watches ranks has had; 0 where there is none."""
    for thread in threading.enumerate():
        if thread.name == "accelerate_watch" and thread.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return 0.0


def compare(first: Callable[[], None], second: Callable[[], None]) -> dict[str, float]:
    """Median over pairs of (second's time / first's time), and each one's best time for a step, in microseconds."""
    first(), second()
    times = []
    for pair in range(PAIRS):
        order = (first, second) if pair % 2 else (second, first)
        seconds = {}
        for loop in order:
            begin = time.perf_counter()
            loop()
            seconds[loop] = time.perf_counter() - begin
        times.append((seconds[first], seconds[second]))
    return {
        "ratio": statistics.median(b / a for a, b in times),
        "floor_us": min(a for a, _ in times) / STEPS * 1e6,
        "prepared_us": min(b for _, b in times) / STEPS * 1e6,
    }


if __name__ == "__main__":
    worker()
