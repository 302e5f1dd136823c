"""Losses, parameters, learning rates and what the accelerator says at every step of training runs of many forms."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from record import RANK, WORLD, done, record
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    set_seed,
)

FORMATS = ("no", "bf16")
SCHEDULES = {
    "none": lambda optimizer: None,
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
    "linear": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one_cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=64),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.last(torch.relu(self.norm(self.first(x))))
        return {"out": out, "half": out.half() if out.dtype == torch.float32 else out}


def data(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    return TensorDataset(torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator))


def numbers(tensors: Any) -> list[float]:
    """A few figures that tell tensors apart."""
    return [
        figure for tensor in tensors for figure in (tensor.double().sum().item(), tensor.double().abs().sum().item())
    ]


def accelerator_with(mixed_precision: str = "no", **options: Any) -> Accelerator:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, mixed_precision=mixed_precision, **options)


def run(
    name: str, accelerator: Accelerator, *, optimizer: str, schedule: str, size: int, batch: int, clip: str
) -> None:
    set_seed(0)
    model = Net()
    chosen = OPTIMIZERS[optimizer](model.parameters())
    scheduler = SCHEDULES[schedule](chosen)
    loader = DataLoader(data(size), batch_size=batch, shuffle=True)
    parts = accelerator.prepare(model, chosen, loader, *([scheduler] if scheduler else []))
    model, chosen, loader = parts[:3]
    losses: list[float] = []
    steps: list[Any] = []
    rates: list[Any] = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                given = model(x)
                loss = nn.functional.mse_loss(given["out"].float(), y)
                accelerator.backward(loss)
                norm = clipped(accelerator, model, clip)
                chosen.step()
                if scheduler:
                    parts[3].step()
                chosen.zero_grad()
            losses.append(loss.item())
            steps.append(
                [accelerator.sync_gradients, accelerator.optimizer_step_was_skipped, norm, str(given["out"].dtype)]
            )
            rates.append([chosen.param_groups[0]["lr"], *(parts[3].get_last_lr() if scheduler else [])])
    record(f"losses {name}", lambda: losses)
    record(f"steps {name}", lambda: steps)
    record(f"rates {name}", lambda: rates)
    record(f"weights {name}", lambda: numbers(accelerator.get_state_dict(model).values()))
    record(f"unwrapped {name}", lambda: type(accelerator.unwrap_model(model)).__name__)
    accelerator.free_memory()


def clipped(accelerator: Accelerator, model: nn.Module, clip: str) -> Any:
    if clip == "norm" and accelerator.sync_gradients:
        return accelerator.clip_grad_norm_(model.parameters(), 0.5).item()
    if clip == "value" and accelerator.sync_gradients:
        accelerator.clip_grad_value_(model.parameters(), 0.05)
    return None


def forms() -> None:
    grid = itertools.product((1, 2, 3), SCHEDULES, (True, False), (False, True), ("none", "norm", "value"))
    for number, (accumulate, schedule, follows, split, clip) in enumerate(grid):
        optimizer = list(OPTIMIZERS)[number % 2]
        mixed = FORMATS[number // 3 % 2]
        size = (16, 22, 26)[number // 2 % 3]
        accelerator = accelerator_with(
            mixed, gradient_accumulation_steps=accumulate, step_scheduler_with_optimizer=follows,
            dataloader_config=DataLoaderConfiguration(split_batches=split),
        )  # fmt: skip
        name = f"{accumulate=} {schedule} {follows=} {split=} {clip} {optimizer} {mixed} {size=}"
        run(name, accelerator, optimizer=optimizer, schedule=schedule, size=size, batch=4, clip=clip)


def plans() -> None:
    """How accumulation can be told."""
    switches = (True, False)
    for adjust, with_loader, each, steps in itertools.product(switches, switches, switches, (2, 3)):
        plugin = GradientAccumulationPlugin(
            num_steps=steps, adjust_scheduler=adjust, sync_with_dataloader=with_loader, sync_each_batch=each
        )
        accelerator = accelerator_with(gradient_accumulation_plugin=plugin)
        name = f"plan {adjust=} {with_loader=} {each=} {steps=}"
        run(name, accelerator, optimizer="sgd", schedule="linear", size=22, batch=4, clip="norm")


def handlers() -> None:
    hook = DDPCommunicationHookType
    for options in (
        {"bucket_cap_mb": 1}, {"static_graph": True}, {"gradient_as_bucket_view": True}, {"comm_hook": "fp16"},
        {"comm_hook": hook.FP16}, {"comm_hook": hook.BF16},
    ):  # fmt: skip
        handler = DistributedDataParallelKwargs(**options)
        accelerator = accelerator_with(kwargs_handlers=[handler])
        run(f"handler {options}", accelerator, optimizer="sgd", schedule="none", size=16, batch=4, clip="none")


def by_hand() -> None:
    """Without `accumulate`: no_sync, several losses, evaluation between steps."""
    accelerator = accelerator_with()
    set_seed(0)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    for step, (x, y) in enumerate(accelerator.prepare(DataLoader(data(24), batch_size=3))):
        with accelerator.no_sync(model):
            accelerator.backward(nn.functional.mse_loss(model(x)["out"], y) / 2)
        accelerator.backward(nn.functional.l1_loss(model(x)["out"], y) / 2)
        seen.append(numbers(p.grad for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen.append(accelerator.gather(model(x)["out"].sum()).tolist())
        model.train(step % 3 != 0)
    record("by_hand", lambda: seen)


def local_sgd() -> None:
    for every, enabled in itertools.product((1, 2, 3), (True, False)):
        accelerator = accelerator_with(gradient_accumulation_steps=1)
        set_seed(0)
        net = nn.Linear(4, 2)
        model, optimizer, loader = accelerator.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(data(24), batch_size=2)
        )
        seen = []
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=every, enabled=enabled) as local:
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local.step()
                seen.append([loss.item(), numbers(accelerator.unwrap_model(model).parameters())])
        record(f"local_sgd {every=} {enabled=}", lambda seen=seen: seen)


def autocasts() -> None:
    for mixed in FORMATS:
        accelerator = accelerator_with(mixed)
        net = accelerator.prepare(Net())
        with accelerator.autocast():
            record(f"autocast {mixed}", lambda: torch.ones(2, 2) @ torch.ones(2, 2))
        record(
            f"outputs {mixed}", lambda net=net: {key: str(value.dtype) for key, value in net(torch.ones(2, 4)).items()}
        )
        record(
            f"plain {mixed}",
            lambda net=net, a=accelerator: a.unwrap_model(net, keep_fp32_wrapper=False)(torch.ones(2, 4)),
        )


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    forms()
    plans()
    by_hand()
    autocasts()
    if WORLD > 1:
        handlers()
        local_sgd()
    record("ranks", lambda: [RANK, WORLD])
    done()
    if WORLD > 1:
        Accelerator().end_training()
