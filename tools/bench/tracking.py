"""What logging costs the thread that trains: scalars to the tracker "local", beside TensorBoard's where it is installed."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from tools.bench.row import Row
from tools.reference import run_json

CALLS = 3000
REPEATS = 5
WORK = 100  # side of the matrices that are multiplied between two calls, as a step would do work


def rows(reference: Path) -> list[Row]:
    """Measure `Accelerator.log` with one and with ten scalars; the median call, then the slowest in a hundred."""
    local = run_json(sys.executable, __file__, "local")
    found = [
        Row(
            f'`log`, {what}, `log_with="local"`',
            "us",
            local[what]["median"],
            None,
            None,
            local[what]["median"],
            20,
            "us",
        )
        for what in ("one scalar", "ten scalars")
    ]
    slow = local["one scalar"]["slow"]
    found.append(
        Row('`log`, one scalar, `log_with="local"`, 99th percentile', "us", slow, None, None, slow, 100, "us")
    )
    if find_spec("tensorboard") is not None:
        ours = run_json(sys.executable, __file__, "tensorboard")["one scalar"]["median"]
        found.append(Row("`log`, one scalar, TensorBoard", "us", ours, None, None, ours, 200, "us"))
    return found


def worker(tracker: str) -> None:
    """Time calls of `log` with some work between them."""
    import torch

    from accelerate import Accelerator

    torch.set_num_threads(1)
    left = torch.randn(WORK, WORK)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for what, names in {"one scalar": ["loss"], "ten scalars": [f"metric{place}" for place in range(10)]}.items():
            accelerator = Accelerator(cpu=True, log_with=tracker, project_dir=folder)
            accelerator.init_trackers(what)
            medians, slow = [], []
            for _ in range(REPEATS):
                times = []
                for step in range(CALLS):
                    values = {name: 1.0 / (step + 1) for name in names}
                    begin = time.perf_counter()
                    accelerator.log(values, step=step)
                    times.append(time.perf_counter() - begin)
                    for _ in range(5):
                        left @ left
                times.sort()
                medians.append(statistics.median(times) * 1e6)
                slow.append(times[int(len(times) * 0.99)] * 1e6)
            accelerator.end_training()
            found[what] = {"median": min(medians), "slow": min(slow)}
    print(json.dumps(found))


if __name__ == "__main__":
    worker(sys.argv[1])
