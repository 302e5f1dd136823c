"""Run by the supervision tests: two processes that do what the first argument says."""

import ctypes
import os
import signal
import sys
import time

import torch

from accelerate import Accelerator


def sleep_for_ever() -> None:
    while True:
        signal.pause()


def keep_the_gil() -> None:
    compiled, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    while True:
        compiled.pthread_mutex_lock(mutex)


def main(what: str) -> None:
    accelerator = Accelerator()
    rank = accelerator.process_index
    accelerator.wait_for_everyone()
    if what == "mismatch":
        accelerator.gather(torch.ones(1)) if rank == 0 else accelerator.wait_for_everyone()
    elif what == "left_alone":
        accelerator.gather(torch.ones(1)) if rank == 0 else sleep_for_ever()
    elif what == "keeps_the_gil":
        time.sleep(1.5)  # long enough to be seen here before
        keep_the_gil()
    elif what == "computes":
        until = time.monotonic() + 4.5  # longer than the timeout of the test
        while rank == 0 and time.monotonic() < until:
            sum(range(1000))
    elif what == "steps":
        layer = torch.nn.Linear(1, 1)
        optimizer = accelerator.prepare(torch.optim.SGD(layer.parameters(), lr=0.1))
        until = time.monotonic() + 4.5
        while time.monotonic() < until:
            time.sleep(0.05) or optimizer.step()
    elif what == "barriers":
        for _ in range(5):
            time.sleep(1) or accelerator.wait_for_everyone()
    elif what == "raises":
        if rank == 1:
            raise ValueError("only this process has a problem")
        accelerator.gather(torch.ones(1))
        accelerator.gather(torch.ones(1))
    elif what == "killed":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        accelerator.gather(torch.ones(1))
        accelerator.gather(torch.ones(1))
    elif what == "waits":
        sys.stdout.write(f"waiting {os.getpid()}\n")  # in one piece: the other process writes, too
        sys.stdout.flush()
        sleep_for_ever()
    accelerator.wait_for_everyone()
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main(sys.argv[1])
