"""Run by the tests of torchft: a replica group of one process, in which an `Accelerator` trains; it may kill itself once."""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchft import Manager, ProcessGroupGloo

from accelerate import Accelerator
from accelerate.utils import set_seed

MORE_STEPS = 5  # together, before group 1 is killed, and twice after it has come back


def train(folder: Path, group: int) -> None:
    """Take steps together with the other group, and write the final weights.

    Args:
        folder: Of the run.
        group: The number of this group. Group 1 kills itself once; the other one goes on, until it has come back.
    """
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    def state() -> dict[str, Any]:
        return {"model": accelerator.unwrap_model(model).state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: dict[str, Any]) -> None:
        accelerator.unwrap_model(model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)), min_replica_size=1, state_dict=state, load_state_dict=load,
        replica_id=f"group{group}", rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        use_async_quorum=False,
    )  # fmt: skip
    steps_together = 0
    was_killed, last = folder / "killed", folder / "last"
    while not last.exists() or manager.current_step() <= int(last.read_text()):
        optimizer.zero_grad()
        manager.start_quorum()  # a group that is new gets the weights and the number of the step from another one
        step, steps_together = manager.current_step(), steps_together + (manager.num_participants() == 2)
        if group == 1 and steps_together == MORE_STEPS:
            if was_killed.exists():
                last.write_text(str(step + MORE_STEPS))
            else:
                was_killed.write_text(str(step))
                os.kill(os.getpid(), signal.SIGKILL)
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + group))
        accelerator.backward((model(batch) - batch.sum(1, keepdim=True)).square().mean())
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        if manager.should_commit():
            optimizer.step()
    weights = [value.hex() for parameter in model.parameters() for value in parameter.flatten().tolist()]
    (folder / f"{group}.weights").write_text(f"{manager.current_step()} {' '.join(weights)}")
    manager.shutdown()
    accelerator.end_training()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
