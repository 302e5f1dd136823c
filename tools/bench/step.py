"""What a training step costs more than the same step written by hand, its loader included: plain, accumulated, clipped, in bf16.

Each library is measured in a process of its own, where the raw loop and the prepared one take turns in short blocks. The
figure is the median difference within the quietest quarter of the pairs.
"""

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

WARM_UP = 4
BLOCKS = 160
STEPS = 100  # of one block
WINDOW = 2
WIDTH = 16
BATCH = 8

CASES = {
    "plain": {},
    "accumulate": {"gradient_accumulation_steps": WINDOW},
    "clip": {},
    "bf16": {"mixed_precision": "bf16"},
}
GOAL_US = 5


def rows(reference: Path) -> list[Row]:
    """Measure ours and the reference."""
    mine, theirs = run_json(sys.executable, __file__, "--worker"), run_json(reference, __file__, "--worker")
    found = []
    for case in CASES:
        added, what = mine[case]["added_us"], f"added to a step of {mine[case]['raw_us']:.0f} us: {case}"
        found.append(Row(what, "us", added, theirs[case]["added_us"], 0.0, added, GOAL_US, "us"))
    return found


def worker() -> None:
    """Measure the library of this interpreter and print the figures of each case."""
    import torch

    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    torch.set_num_threads(1)
    found = {}
    for case, arguments in CASES.items():
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True, **arguments)
        raw, prepared = raw_loop(case), prepared_loop(case, accelerator)
        pairs = [by_turns(raw, prepared, swap=bool(block % 2)) for block in range(WARM_UP + BLOCKS)][WARM_UP:]
        quiet = sorted(pairs, key=sum)[: BLOCKS // 4]
        found[case] = {
            "raw_us": statistics.median(first for first, _ in quiet) / STEPS * 1e6,
            "added_us": statistics.median(second - first for first, second in quiet) / STEPS * 1e6,
        }
    print(json.dumps(found), flush=True)


def by_turns(first: Callable[[], None], second: Callable[[], None], *, swap: bool) -> tuple[float, float]:
    """Seconds that each loop takes, run one after the other."""
    seconds = {}
    for loop in (second, first) if swap else (first, second):
        begin = time.perf_counter()
        loop()
        seconds[loop] = time.perf_counter() - begin
    return seconds[first], seconds[second]


def make() -> tuple[Any, Any, Any]:
    """A tiny model, its optimizer, and a loader with the batches of a block."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples = TensorDataset(*torch.randn(2, STEPS * BATCH, WIDTH))
    return model, optimizer, DataLoader(samples, BATCH, shuffle=True)


def raw_loop(case: str) -> Callable[[], None]:
    """A block of steps in plain torch."""
    import torch
    from torch import nn

    model, optimizer, loader = make()
    parameters = list(model.parameters())

    def loop() -> None:
        for step, (inputs, targets) in enumerate(loader):
            if case == "bf16":
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    outputs = model(inputs)
                outputs = outputs.float()
            else:
                outputs = model(inputs)
            loss = nn.functional.mse_loss(outputs, targets)
            if case == "accumulate":
                (loss / WINDOW).backward()
                if step % WINDOW == WINDOW - 1:
                    optimizer.step()
                    optimizer.zero_grad()
                continue
            loss.backward()
            if case == "clip":
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return loop


def prepared_loop(case: str, accelerator: Any) -> Callable[[], None]:
    """The same block, prepared."""
    from torch import nn

    model, optimizer, loader = accelerator.prepare(*make())
    parameters = list(model.parameters())

    def step(inputs: Any, targets: Any) -> None:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        if case == "clip":
            accelerator.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def loop() -> None:
        for inputs, targets in loader:
            if case == "accumulate":
                with accelerator.accumulate(model):
                    step(inputs, targets)
            else:
                step(inputs, targets)

    return loop


def main() -> None:
    """Measure and print the table."""
    print(table(rows(reference_python())))


if __name__ == "__main__":
    worker() if "--worker" in sys.argv else main()
