"""Run by the tests of Ray, and imported by `trainer.py`: trains, saves after each step, and resumes from the newest checkpoint."""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, gather, set_seed

SAMPLES = 40


def train(
    folder: Path, *, num_samples: int = SAMPLES, kills: Sequence[tuple[int, int, str]] = (), waits_at: int = -1,
    **options: Any,
) -> None:  # fmt: skip
    """Write the samples of each step and the final weight into a folder.

    At one step, all wait for a signal, or for a file `end`.

    Args:
        folder: Of the run.
        num_samples: Of the data set.
        kills: At which step which rank is killed, `before` the step or while `saving` after it; each once.
        waits_at: The step at which all wait.
        **options: Of `ProjectConfiguration`.
    """
    number = getattr(signal, options.get("save_on_signals", "SIGTERM"))
    before = signal.getsignal(number) if "save_on_signals" in options else None  # as it is after the signal, too
    set_seed(0)
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=3, **options),
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
    )
    model = torch.nn.Linear(1, 1)
    samples: Any = torch.arange(num_samples, dtype=torch.float32)[:, None] / num_samples
    loader = torch.utils.data.DataLoader(samples, batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    accelerator.resume()

    def die(step: int, when: str) -> None:
        mark = folder / f"{step}.{when}.killed"
        if (step, accelerator.process_index, when) in map(tuple, kills) and not mark.exists():
            mark.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    accelerator.register_save_state_pre_hook(lambda *_: die(accelerator.project_configuration.iteration, "saving"))
    first = accelerator.project_configuration.iteration
    for step, batch in enumerate(loader, start=first):
        die(step, "before")
        accelerator.backward((model(batch) - batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        taken = [round(sample * num_samples) for sample in gather(batch).flatten().tolist()]
        if accelerator.is_main_process:
            (folder / f"{step}.step").write_text(json.dumps(taken))
            with open(folder / "log", "a") as log:
                log.write(f"{step} {time.time()}\n")
        accelerator.save_state()
        while step == waits_at and not (folder / "end").exists() and signal.getsignal(number) is not before:
            time.sleep(0.05)
    if accelerator.is_main_process:
        (folder / "weight").write_text(accelerator.unwrap_model(model).weight.item().hex())
    accelerator.print(f"began at step {first}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    train(Path(sys.argv[1]), **json.loads(sys.argv[2]))
