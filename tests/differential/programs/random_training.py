"""Training programs chosen by chance: what every step sees, and the weights at the end.

python random_training.py FIRST_SEED NUMBER
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from record import FOLDER, RANK, done, record
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, set_seed

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, 0.01),
}
SCHEDULERS: dict[str, Any] = {
    "none": lambda optimizer: None,
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "decay": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=200),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
    ),
}


@dataclass
class Program:
    """What chance has chosen."""

    accumulates: int
    plugin: dict[str, Any] | None
    precision: str
    split_batches: bool
    steps_scheduler: bool
    samples: int
    batch_size: int
    shuffles: bool
    clips: str
    optimizer: str
    scheduler: str
    normalizes_batches: bool
    prepares: str
    zeroes: str
    sets_none: bool
    windows: str
    saves: bool
    seeds_differ: bool

    @classmethod
    def by_chance(cls, seed: int) -> Program:
        chance = random.Random(seed)
        pick = chance.choice
        return cls(
            accumulates=pick([1, 1, 2, 3]),
            plugin=pick([None, None, {"sync_with_dataloader": False}, {"sync_each_batch": True}, {"adjust_scheduler": False}]),
            precision=pick(["no", "no", "bf16"]),
            split_batches=pick([False, False, False, True]),
            steps_scheduler=pick([True, True, False]),
            samples=pick([8, 9, 12, 13]),
            batch_size=pick([2, 4]),
            shuffles=pick([False, True]),
            clips=pick(["", "norm", "largest", "value"]),
            optimizer=pick(sorted(OPTIMIZERS)),
            scheduler=pick(sorted(SCHEDULERS)),
            normalizes_batches=pick([False, False, True]),
            prepares=pick(["together", "one by one", "loader first"]),
            zeroes=pick(["before", "after"]),
            sets_none=pick([False, True]),
            windows=pick(["accumulate", "accumulate", "no_sync"]),
            saves=pick([False, False, True]),
            seeds_differ=pick([False, False, True]),
        )  # fmt: skip


class Net(nn.Module):
    def __init__(self, normalizes_batches: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4) if normalizes_batches else nn.LayerNorm(4)
        self.last = nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(torch.tanh(self.norm(self.first(inputs))))


def run(seed: int, program: Program) -> Any:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accumulation = (
        {"gradient_accumulation_steps": program.accumulates}
        if program.plugin is None
        else {"gradient_accumulation_plugin": GradientAccumulationPlugin(program.accumulates, **program.plugin)}
    )
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=program.precision,
        dataloader_config=DataLoaderConfiguration(split_batches=program.split_batches),
        step_scheduler_with_optimizer=program.steps_scheduler,
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=True)],
        **accumulation,
    )
    set_seed(11 + RANK * program.seeds_differ)
    model: Any = Net(program.normalizes_batches)
    optimizer: Any = OPTIMIZERS[program.optimizer](model.parameters())
    scheduler: Any = SCHEDULERS[program.scheduler](optimizer)
    inputs = torch.randn(program.samples, 3, generator=torch.Generator().manual_seed(seed))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader: Any = DataLoader(data, batch_size=program.batch_size, shuffle=program.shuffles)
    if program.prepares == "together":
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    elif program.prepares == "one by one":
        model, optimizer, loader, scheduler = map(accelerator.prepare, (model, optimizer, loader, scheduler))
    else:
        loader = accelerator.prepare(loader)
        model, optimizer = accelerator.prepare(model, optimizer)
        scheduler = accelerator.prepare_scheduler(scheduler) if scheduler is not None else None
    steps: list[Any] = []
    for epoch in range(2):
        for number, (batch, targets) in enumerate(loader):
            steps.append(step(accelerator, program, number, model, optimizer, scheduler, batch, targets))
        if program.scheduler == "plateau":
            scheduler.scheduler.step(1.0)  # 1.15 steps the prepared one once per rank
        if program.saves and epoch == 0:
            folder = FOLDER / f"state_{seed}"
            accelerator.wait_for_everyone()
            accelerator.save_state(str(folder))
            accelerator.wait_for_everyone()
            accelerator.load_state(str(folder))
            accelerator.wait_for_everyone()
    weights = {name: value.float().flatten().tolist() for name, value in accelerator.get_state_dict(model).items()}
    settings = {name: str(value) for name, value in optimizer.state_dict()["param_groups"][0].items() if name != "lr"}
    freed = accelerator.free_memory(model, optimizer, loader)
    return [steps, weights, settings, accelerator.sync_gradients, [repr(item) for item in freed or []]]


def step(
    accelerator: Any,
    program: Program,
    number: int,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    batch: Any,
    targets: Any,
) -> Any:
    if program.windows == "accumulate":
        window = accelerator.accumulate(model)
    else:
        ends = number % program.accumulates == program.accumulates - 1
        window = contextlib.nullcontext() if ends else accelerator.no_sync(model)
    norm = None
    with window:
        if program.zeroes == "before":
            optimizer.zero_grad(set_to_none=program.sets_none)
        loss = nn.functional.mse_loss(model(batch), targets)
        accelerator.backward(loss)
        if program.clips and accelerator.sync_gradients:
            if program.clips == "value":
                accelerator.clip_grad_value_(model.parameters(), 0.1)
            else:
                kind = 2 if program.clips == "norm" else float("inf")
                norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.5, norm_type=kind))
        optimizer.step()
        if scheduler is not None and program.scheduler != "plateau":
            scheduler.step()
        if program.zeroes == "after":
            optimizer.zero_grad(set_to_none=program.sets_none)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    last = None if scheduler is None else [float(rate) for rate in scheduler.get_last_lr()]
    return [loss.item(), norm, accelerator.sync_gradients, optimizer.step_was_skipped, rates, last]


if __name__ == "__main__":
    tempfile.tempdir = str(Path(FOLDER))
    first, count = int(sys.argv[1]), int(sys.argv[2])
    for chosen in range(first, first + count):
        made = Program.by_chance(chosen)
        record(f"{chosen} {asdict(made)}", lambda chosen=chosen, made=made: run(chosen, made))
    done()
