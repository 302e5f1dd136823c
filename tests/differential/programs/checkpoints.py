"""Train, save and go on; or load what another wrote and go on from there: the same losses must follow.

python checkpoints.py save|load FOLDER
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import RANK, WORLD, done, record
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    init_empty_weights,
    load_checkpoint_in_model,
    skip_first_batches,
)
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration, load_state_dict, set_seed

HOW, FOLDER = sys.argv[1], Path(sys.argv[2])
TRAINED = 5  # batches before saving
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, amsgrad=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.dropout(self.norm(torch.relu(self.embed(x))), 0.2, self.training))


class Counter:
    """Something of the user's own."""

    def __init__(self) -> None:
        self.count, self.values = 0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.values = state["count"], state["values"]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(64, 4, generator=generator), torch.randn(64, 4, generator=generator))


def state(safe: bool, optimizer: str, seedable: bool, automatic: bool) -> None:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    name = f"{safe=} {optimizer} {seedable=} {automatic=}"
    folder = FOLDER / name.replace(" ", "_")
    configuration = DataLoaderConfiguration(use_seedable_sampler=seedable, data_seed=5)
    accelerator = Accelerator(
        cpu=True, dataloader_config=configuration,
        project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=automatic),
    )  # fmt: skip
    set_seed(3 if HOW == "save" else 77)
    net, counter = Net(), Counter()
    chosen = OPTIMIZERS[optimizer](net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(chosen, 2, 0.7)
    loader = DataLoader(data(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(9))
    net, chosen, scheduler, loader = accelerator.prepare(net, chosen, scheduler, loader)
    accelerator.register_for_checkpointing(counter)

    def step(x: torch.Tensor, y: torch.Tensor) -> list[float]:
        loss = nn.functional.mse_loss(net(x), y)
        accelerator.backward(loss)
        chosen.step()
        scheduler.step()
        chosen.zero_grad()
        counter.count += 1
        return [loss.item(), scheduler.get_last_lr()[0], counter.count]

    place = None if automatic else str(folder / "own")
    if HOW == "save":
        for _, batch in zip(range(TRAINED), loader, strict=False):
            step(*batch)
        loader.end()
        accelerator.save_state(place, safe_serialization=safe)
    else:
        accelerator.load_state(place)
    drawn = [random.random(), float(np.random.rand()), torch.rand(1).item()]
    record(f"drawn {name}", lambda: drawn)
    if RANK == 0:  # the others have running means of their own, and go on with those of the first
        record(f"weights {name}", lambda: dict(accelerator.get_state_dict(net)))
    rest = [step(*batch) for _, batch in zip(range(5), skip_first_batches(loader, 2), strict=False)]
    record(f"going on {name}", lambda: rest)
    record(f"counter {name}", lambda: [counter.count, counter.values])


def models() -> None:
    """Weights alone, whole and in shards."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    for safe, shard in itertools.product((True, False), ("10GB", "0.2KB")):
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4).to(torch.bfloat16))
        expected = net.state_dict()
        folder = FOLDER / f"model_{safe}_{shard}"
        if HOW == "save":
            accelerator.save_model(net, folder, max_shard_size=shard, safe_serialization=safe)
        names = sorted(path.name for path in folder.glob("*") if path.name != "manifest.json")
        record(f"files {safe} {shard}", lambda names=names: names)
        for how in ("whole", "empty", "mapped"):
            torch.manual_seed(8)
            with init_empty_weights(include_buffers=False) if how == "empty" else torch.device("cpu"):
                other = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4).to(torch.bfloat16))
            options: dict[str, Any] = {"device_map": {"": "cpu"}} if how == "mapped" else {}

            def see(other=other, options=options, folder=folder, expected=expected):
                load_checkpoint_in_model(other, str(folder), **options)
                return [key for key, value in other.state_dict().items() if not torch.equal(value, expected[key])]

            record(f"load {safe} {shard} {how}", see)
        for path in sorted(folder.glob("*.safetensors")):
            record(f"state_dict {safe} {path.name}", lambda path=path: load_state_dict(str(path)))


if __name__ == "__main__":
    for case in itertools.product((True, False), OPTIMIZERS, (False, True), (False, True)):
        state(*case)
    if WORLD == 1:
        models()
    record("ranks", lambda: [RANK, WORLD])
    done()
    if WORLD > 1:
        Accelerator().end_training()
