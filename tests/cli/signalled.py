"""Run by the signal tests: waits for a signal, and ends with a status of its own on the ranks that handle it.

Arguments: the name of the signal, the ranks that handle it ("0,1"), the status they end with, how long rank 1 needs for
it, and whether to make an Accelerator ("with_accelerator") and to wait until the launcher has asked for stacks.
"""

import os
import signal
import sys
import time

name, ranks, status, seconds, kind = sys.argv[1:]
rank = os.environ["RANK"]
if rank in ranks.split(","):
    signals: list[int] = []
    signal.signal(getattr(signal, name), lambda number, _: signals.append(number))
if kind == "with_accelerator":
    from accel_state.supervision import VARIABLE, report_progress
    from accelerate import Accelerator

    Accelerator().wait_for_everyone()
    folder = os.environ[VARIABLE].partition(":")[2]
    while not os.path.getsize(os.path.join(folder, f"{rank}.stacks")):  # until the launcher has asked where we are
        time.sleep(0.02) or report_progress()
sys.stdout.write("ready\n")
sys.stdout.flush()
while rank not in ranks.split(",") or not signals:
    time.sleep(0.02)
    if kind == "with_accelerator":
        report_progress()
if rank == "1":
    time.sleep(float(seconds))
sys.stdout.write(f"rank {rank} got {signals}\n")
sys.stdout.flush()
sys.exit(int(status))
