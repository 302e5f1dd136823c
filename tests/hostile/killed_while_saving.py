"""Kill training processes that save in the background, at random moments, and see what can be loaded afterwards.

Run as a program: `python -m tests.hostile.killed_while_saving FOLDER NUM_KILLS`. Prints one JSON object: how many processes
were killed before their first checkpoint, in a save and between saves, and what was found wrong. Processes are forked from
this one, which has imported torch already.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate.checkpoint.manifest import Manifest
from tests.support.keeping import Counter, Kept, make_kept

WIDTH = 512  # 4 MB of states
LONGEST_LIFE_SECONDS = 0.4


def make_run(folder: Path) -> Kept:
    """A run whose states all say at which step they were saved."""
    kept = make_kept(folder, total_limit=2)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    kept._models[:], kept._optimizers[:], kept._schedulers[:] = [model], [optimizer], []
    kept._custom_objects[:] = [Counter(0)]
    return kept


def train(kept: Kept) -> None:
    """Train and save until killed: each save is followed at once by changes in place."""
    begin = kept.step
    for step in itertools.count(begin + 1):
        kept.fill(step)
        for parameter in kept._models[0].parameters():
            kept._optimizers[0].state[parameter]["momentum_buffer"] = torch.full_like(parameter, step)
        kept.save_state(async_save=True)
        kept.fill(-1.0)


def what_is_wrong(folder: Path, seed: int) -> tuple[int, list[str]]:
    """The step that is loaded, and problems: a mixed or damaged checkpoint, or rubbish after the next save."""
    kept = make_run(folder)
    try:
        kept.load_state()
    except Exception as error:
        return 0, [f"kill {seed}: cannot be loaded: {error!r}"]
    moments = {
        value for state in kept._optimizers[0].state.values() for value in state["momentum_buffer"].unique().tolist()
    }
    problems = [] if len(kept.values() | moments) == 1 else [f"kill {seed}: mixed values {kept.values() | moments}"]
    actual = kept.step
    kept.save_state(async_save=True).result()
    if hidden := [path.name for path in folder.rglob(".*")]:
        problems.append(f"kill {seed}: left behind: {hidden}")
    return actual, problems


def has_begun(folder: Path) -> bool:
    """Whether there is a checkpoint."""
    return any(Manifest.read(path) is not None for path in (folder / "checkpoints").glob("checkpoint_*"))


def kill_once(folder: Path, seed: int) -> dict[str, Any]:
    """Train in a process of its own, which is killed at a random moment."""
    child = os.fork()
    if child == 0:
        try:
            kept = make_run(folder)
            if has_begun(folder):
                kept.load_state()
            train(kept)
        finally:
            os._exit(1)
    time.sleep(random.Random(seed).random() * LONGEST_LIFE_SECONDS)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not has_begun(folder):
        return {"when": "before the first", "step": 0, "problems": []}
    in_save = any((folder / "checkpoints").glob(".*"))
    step, problems = what_is_wrong(folder, seed)
    return {"when": "in a save" if in_save else "between saves", "step": step, "problems": problems}


def main() -> None:
    torch.set_num_threads(1)  # forked processes would wait for threads that are gone
    folder, num_kills = Path(sys.argv[1]), int(sys.argv[2])
    make_run(folder).keeper.finish()
    actual: dict[str, Any] = {"before the first": 0, "in a save": 0, "between saves": 0, "problems": []}
    last = 0
    for seed in range(num_kills):
        outcome = kill_once(folder, seed)
        actual[outcome["when"]] += 1
        actual["problems"] += outcome["problems"]
        if outcome["step"] < last:
            actual["problems"].append(f"kill {seed}: step {outcome['step']} after {last}")
        last = outcome["step"]
    actual["last step"] = last
    print(json.dumps(actual))  # noqa: T201


if __name__ == "__main__":
    main()
