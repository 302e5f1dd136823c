"""Run by the tests of Ray, and imported by `trainer.py`: trains, saves after each step, and resumes from the newest checkpoint."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, gather, set_seed

SAMPLES = 40


def train(folder: Path, *, killed_at: int = -1, waits_at: int = -1, **options: Any) -> None:
    """Write the samples of each step and the final weight into a folder.

    At one step, rank 1 is killed, if it was not before; at another, all wait for a signal, or for a file `end`.
    """
    before = (
        signal.getsignal(signal.SIGTERM) if "save_on_signals" in options else None
    )  # as it is after the signal, too
    set_seed(0)
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=3, **options),
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
    )
    model = torch.nn.Linear(1, 1)
    samples: Any = torch.arange(SAMPLES, dtype=torch.float32)[:, None] / SAMPLES
    loader = torch.utils.data.DataLoader(samples, batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    accelerator.resume()
    first = accelerator.project_configuration.iteration
    for step, batch in enumerate(loader, start=first):
        if step == killed_at and accelerator.process_index == 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        accelerator.backward((model(batch) - batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        taken = [round(sample * SAMPLES) for sample in gather(batch).flatten().tolist()]
        if accelerator.is_main_process:
            (folder / f"{step}.step").write_text(json.dumps(taken))
        accelerator.save_state()
        while step == waits_at and not (folder / "end").exists() and signal.getsignal(signal.SIGTERM) is not before:
            time.sleep(0.05)
    if accelerator.is_main_process:
        (folder / "weight").write_text(accelerator.unwrap_model(model).weight.item().hex())
    accelerator.print(f"began at step {first}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    train(Path(sys.argv[1]), **json.loads(sys.argv[2]))
