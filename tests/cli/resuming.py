"""Run by the multi-node tests: trains on two machines, stores every step, and goes on where it was when started again."""

import json
import socket
import sys
import time
from pathlib import Path

import torch

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, gather_object

STEPS = 8


def main(folder: Path, pause: float) -> None:
    accelerator = Accelerator(
        project_config=ProjectConfiguration(str(folder / socket.gethostname()), automatic_checkpoint_naming=True)
    )
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    first = 0
    done = folder / socket.gethostname() / "checkpoints"
    if done.exists():
        accelerator.load_state()
        first = int(max(done.iterdir(), key=lambda path: int(path.name.split("_")[1])).name.split("_")[1]) + 1
    first = min(gather_object([first]))
    for step in range(first, STEPS):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        accelerator.project_configuration.iteration = step
        accelerator.save_state()
        (folder / f"{socket.gethostname()}.step").write_text(str(step))
        time.sleep(pause)
    names = gather_object([socket.gethostname()])
    if accelerator.is_main_process:
        print(json.dumps({"first": first, "names": names, "bias": model.module.bias.item()}), flush=True)  # noqa: T201
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
