#!/usr/bin/env python3
"""Count how often processes that did all their work die at exit: `uv run tools/exit_check.py --runs 50`.

Two gloo processes train with DistributedDataParallel and the PowerSGD communication hook, which hands the most Python
objects to the group's threads, and end without closing anything. `--case plain` does it with torch alone, to see how
often it would go wrong; `--case error` has one process fail, which must end both soon.
"""

from __future__ import annotations

import argparse
import collections
import os
import socket
import subprocess
import sys
import time

SECONDS_TO_END = 300
SECONDS_AFTER_A_FAILURE = 10
CASES = {
    "prepared": "the group is left open",
    "destroyed": "the group is destroyed by hand, the model still holds it",
    "plain": "as `prepared`, with torch alone",
    "error": "one process fails in the middle of training",
    "stuck": "one process fails, with a collective under way that the other never joins",
}
FAILING = ("error", "stuck")


def train(case: str) -> None:
    """What each process runs."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    if case == "plain":
        dist.init_process_group("gloo")
    else:
        from accel_state.processes import PartialState

        PartialState(cpu=True)
    rank = dist.get_rank()
    global model  # still there when the interpreter ends
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)))
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        if case == "error" and rank == 1 and step == 4:
            raise RuntimeError("this process fails on purpose")
        optimizer.zero_grad()
        model(torch.randn(16, 64)).sum().backward()
        optimizer.step()
    if case == "stuck" and rank == 1:
        dist.all_reduce(torch.zeros(4), async_op=True)  # the other process never takes part
        raise RuntimeError("this process fails on purpose, in the middle of a collective")
    if case == "stuck":
        time.sleep(SECONDS_TO_END)  # until it is killed, as a launcher does once another process has failed
    if case == "destroyed":
        dist.destroy_process_group()


def run_once(case: str) -> tuple[int | str, ...]:
    """Run two processes and return how each of them ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--process", case],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    codes: list[int | str] = []
    end = time.monotonic() + SECONDS_TO_END
    for process in reversed(processes):  # the one that fails on purpose first
        try:
            codes.append(process.wait(max(0.0, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append("killed")
        if case in FAILING:  # the other one must end by itself, or is killed at once
            end = min(end, time.monotonic() + (SECONDS_AFTER_A_FAILURE if case == "error" else 0))
        process.kill()
        process.wait()
    return tuple(reversed(codes))


def main() -> int:
    """Count exit codes; fails when they are not those of a clean end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--case", choices=CASES, default="prepared", help="; ".join(map(": ".join, CASES.items())))
    parser.add_argument("--process", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        train(arguments.process)
        return 0
    counts: collections.Counter[tuple[int | str, ...]] = collections.Counter()
    slowest = 0.0
    for _ in range(arguments.runs):
        start = time.monotonic()
        counts[run_once(arguments.case)] += 1
        slowest = max(slowest, time.monotonic() - start)
    for codes, count in counts.most_common():
        print(f"{count:4} of {arguments.runs} runs ended with exit codes {codes}")
    print(f"slowest run: {slowest:.0f} s")
    clean = all(codes[1] == 1 if arguments.case in FAILING else codes == (0, 0) for codes in counts)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
