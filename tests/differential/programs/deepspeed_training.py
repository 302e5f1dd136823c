"""DeepSpeed on the CPU: filled configurations, losses, weights, norms; and states that the other library wrote.

python deepspeed_training.py train
python deepspeed_training.py save|load FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_DEEPSPEED": "true"}
os.environ.pop("ACCELERATE_USE_CPU", None)  # told so, 1.15 trains without DeepSpeed

import deepspeed
import torch
from record import RANK, WORLD, done, record
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DummyOptim, DummyScheduler, set_seed

HOW = sys.argv[1]
FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()
STAGES = (0, 1, 2, 3)
SIZES = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"},
}
DECAY = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": 0.001,
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
    },
}
BUCKETS = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
)


class Net(nn.Module):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 2)
        if config:
            self.config = SimpleNamespace(**config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def config_of(stage: int, zero: Any = None, **sections: Any) -> dict[str, Any]:
    return {**SIZES, "zero_optimization": {"stage": stage, **(zero or {})}, **sections}


def loader_of(batch: int, size: int = 80) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(4)
    return DataLoader(
        TensorDataset(torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)),
        batch_size=batch,
    )


def accelerator_with(plugin: Any, **options: Any) -> Accelerator:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(deepspeed_plugin=plugin, **options)


def step(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, batch: Any) -> list[Any]:
    x, y = batch
    with accelerator.accumulate(model):
        loss = (model(x) - y).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    rate = None if scheduler is None else float(scheduler.get_last_lr()[0])
    return [loss.item(), accelerator.sync_gradients, bool(accelerator.optimizer_step_was_skipped), rate]


def leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    actual: dict[str, Any] = {}
    for name, value in config.items():
        actual |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return actual


# ---- what fills "auto" ------------------------------------------------------------------------------------------------

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "sizes": {"config": config_of(2)},
    "two loaders, smallest": {"config": config_of(2), "batches": (8, 2)},
    "two loaders, largest": {"config": config_of(2), "batches": (8, 2), "smallest": False},
    "accumulation of the accelerator": {"config": config_of(1), "steps": 3},
    "accumulation of the configuration": {"config": config_of(1, gradient_accumulation_steps=2)},
    "micro batch is fixed": {"config": config_of(1, train_micro_batch_size_per_gpu=5)},
    "clipping is auto": {"config": config_of(2, gradient_clipping="auto")},
    "clipping is fixed": {"config": config_of(2, gradient_clipping=0.3)},
    "split batches": {"config": config_of(2), "split": True},
    "hidden size": {"config": config_of(3, zero=BUCKETS), "model": {"hidden_size": 8}},
    "hidden sizes": {"config": config_of(3, zero=BUCKETS), "model": {"hidden_sizes": [4, 16]}},
    "text config": {"config": config_of(3, zero=BUCKETS), "model": {"text_config": SimpleNamespace(hidden_size=12)}},
    "buckets below stage 3": {
        "config": config_of(2, zero={"reduce_bucket_size": "auto"}), "model": {"hidden_size": 8},
    },
    "no hidden size": {"config": config_of(3, zero=BUCKETS)},
    "16-bit weights": {
        "config": config_of(3, zero={"stage3_gather_16bit_weights_on_model_save": "auto"}), "model": {"hidden_size": 8},
    },
    "optimizer": {"config": config_of(2, optimizer=ADAMW), "optimizer": "dummy"},
    "warmup": {"config": config_of(2, optimizer=ADAMW, scheduler=WARMUP), "optimizer": "dummy", "scheduler": "dummy"},
    "decay": {"config": config_of(2, optimizer=ADAMW, scheduler=DECAY), "optimizer": "dummy", "scheduler": "dummy"},
    "decay, split batches": {
        "config": config_of(2, optimizer=ADAMW, scheduler=DECAY),
        "optimizer": "dummy", "scheduler": "dummy", "split": True,
    },
    "decay of a real optimizer": {"config": config_of(2, scheduler=DECAY), "scheduler": "dummy"},
    "no section for the optimizer": {"config": config_of(2), "optimizer": "dummy"},
    "no section for the scheduler": {"config": config_of(2), "scheduler": "dummy"},
    "optimizer twice": {"config": config_of(2, optimizer=ADAMW)},
    "scheduler twice": {"config": config_of(2, scheduler=WARMUP), "scheduler": "real"},
    "real scheduler of a dummy": {"config": config_of(2, optimizer=ADAMW), "optimizer": "dummy", "scheduler": "real"},
    "no loader": {"config": config_of(2), "batches": ()},
    "no loader, size is fixed": {"config": config_of(2, train_micro_batch_size_per_gpu=2), "batches": ()},
    "offloaded": {
        "config": config_of(
            2, zero={"offload_optimizer": {"device": "cpu", "pin_memory": False}}, zero_force_ds_cpu_optimizer=False
        )
    },
    "unknown auto": {"config": config_of(2, wall_clock_breakdown="auto")},
    "bf16": {"config": config_of(2, bf16={"enabled": "auto"}), "precision": "bf16"},
    "bf16 of the configuration only": {"config": config_of(2, bf16={"enabled": True}), "precision": None},
    "bf16 against no": {"config": config_of(2, bf16={"enabled": "auto"}), "precision": "no"},
}  # fmt: skip


def prepared(
    config: Any,
    *,
    batches: Any = (4,),
    smallest: bool = True,
    steps: int = 1,
    split: bool = False,
    model: Any = None,
    optimizer: str = "real",
    scheduler: str | None = None,
    precision: str | None = "no",
) -> Any:
    from accelerate import DataLoaderConfiguration

    plugin = DeepSpeedPlugin(hf_ds_config=config, is_train_batch_min=smallest, zero3_init_flag=False)
    accelerator = accelerator_with(
        plugin,
        gradient_accumulation_steps=steps,
        mixed_precision=precision,
        dataloader_config=DataLoaderConfiguration(split_batches=split),
    )
    set_seed(0)
    net = Net(**(model or {}))
    make = {"real": torch.optim.AdamW, "dummy": DummyOptim}[optimizer]
    chosen = make(net.parameters(), lr=0.02, weight_decay=0.01)
    schedule: Any = None
    if scheduler == "real":
        schedule = torch.optim.lr_scheduler.LambdaLR(
            chosen if isinstance(chosen, torch.optim.Optimizer) else torch.optim.SGD(net.parameters(), lr=0.02),
            lambda step: 1 / (1 + step),
        )
    elif scheduler == "dummy":
        schedule = DummyScheduler(chosen, total_num_steps=41, warmup_num_steps=5)
    elif scheduler == "callable":
        schedule = DummyScheduler(
            chosen,
            lr_scheduler_callable=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step)),
        )
    loaders = [loader_of(size) for size in batches]
    parts = accelerator.prepare(net, chosen, *([schedule] if schedule is not None else []), *loaders)
    engine, chosen = parts[:2]
    schedule = parts[2] if schedule is not None else None
    return accelerator, engine, chosen, schedule, list(parts[len(parts) - len(loaders) :])


def fill(name: str, settings: dict[str, Any]) -> None:
    asked = leaves(settings["config"])
    kept: list[Any] = []

    def see() -> Any:
        accelerator, engine, *_ = prepared(**settings)
        kept.append((accelerator, engine))
        return {key: leaves(accelerator.deepspeed_config if hasattr(accelerator, "deepspeed_config") else
                            accelerator.state.deepspeed_plugin.deepspeed_config).get(key) for key in asked}  # fmt: skip

    record(f"filled {name}", see)
    if not kept:
        return
    accelerator, engine = kept[0]
    record(
        f"engine {name}",
        lambda: [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_clipping(),
                 engine.gradient_accumulation_steps(), engine.zero_optimization_stage(),
                 accelerator.gradient_accumulation_steps],
    )  # fmt: skip


# ---- losses -----------------------------------------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    "real, real": {"config": config_of(2), "scheduler": "real"},
    "real, dummy": {"config": config_of(2, scheduler=DECAY), "scheduler": "dummy"},
    "dummy, dummy": {
        "config": config_of(2, optimizer=ADAMW, scheduler=WARMUP), "optimizer": "dummy", "scheduler": "dummy",
    },
    "dummy, callable": {"config": config_of(2, optimizer=ADAMW), "optimizer": "dummy", "scheduler": "callable"},
    "dummy, none": {"config": config_of(2, optimizer=ADAMW), "optimizer": "dummy"},
    "accumulating": {"config": config_of(2), "scheduler": "real", "steps": 3},
    "accumulating, dummies": {
        "config": config_of(2, optimizer=ADAMW, scheduler=WARMUP), "optimizer": "dummy", "scheduler": "dummy", "steps": 2,
    },
    "clipped": {"config": config_of(2, gradient_clipping=0.1)},
    "split batches": {"config": config_of(2), "scheduler": "real", "split": True},
}  # fmt: skip
RUNS |= {f"stage {stage}": {"config": config_of(stage), "scheduler": "real"} for stage in STAGES}


def losses(name: str, settings: dict[str, Any]) -> None:
    def see() -> Any:
        accelerator, model, optimizer, scheduler, (loader,) = prepared(**settings)
        seen = [step(accelerator, model, optimizer, scheduler, batch) for batch in loader]
        return [seen, model.global_steps, len(loader)]

    record(f"losses {name}", see)


def results(stage: int, gathers: bool, precision: str) -> None:
    """Norms and whole weights."""
    plugin = DeepSpeedPlugin(
        zero_stage=stage, zero3_init_flag=False, zero3_save_16bit_model=gathers, gradient_clipping=0.5,
        gradient_accumulation_steps=1,
    )  # fmt: skip
    accelerator = accelerator_with(plugin, mixed_precision=precision)
    set_seed(0)
    net = Net()
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader_of(4))
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    name = f"stage {stage}, gathers={gathers}, {precision}"
    record(f"norm before, {name}", lambda: accelerator.clip_grad_norm_(model.parameters(), 0.5))
    norms, values = [], []
    for _, (x, y) in zip(range(3), loader, strict=False):
        out = model(x.to(kind))
        values.append([str(out.dtype), out.float().sum().item()])
        accelerator.backward((out.float() - y).square().mean())
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    loader.end()
    record(f"outputs, {name}", lambda: values)
    record(f"norms, {name}", lambda: norms)
    record(f"unwrapped, {name}", lambda: [type(accelerator.unwrap_model(model)).__name__, type(model).__name__])
    record(
        f"state dict, {name}",
        lambda: {
            key: [str(value.dtype), value.device.type, value.float().tolist()]
            for key, value in (accelerator.get_state_dict(model) or {}).items()
        },
    )

    def saved() -> Any:
        folder = Path(f"saved_{stage}_{gathers}_{precision}")
        accelerator.save_model(model, folder)
        accelerator.wait_for_everyone()
        return sorted(path.name for path in folder.iterdir() if path.name != "manifest.json")

    record(f"saved, {name}", saved)


# ---- states -----------------------------------------------------------------------------------------------------------


def state(stage: int, precision: str, schedule: bool, dummies: bool) -> None:
    name = f"stage {stage}, {precision}, {schedule=}, {dummies=}"
    folder = FOLDER / name.replace(" ", "_")
    kinds = ("dummy", "dummy" if schedule else None) if dummies else ("real", "real" if schedule else None)
    sections = {"optimizer": ADAMW, **({"scheduler": WARMUP} if schedule else {})} if dummies else {}
    accelerator, model, optimizer, scheduler, (loader,) = prepared(
        config_of(stage, **sections), optimizer=kinds[0], scheduler=kinds[1], precision=precision
    )
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    batches = [(x.to(kind), y.to(kind)) for x, y in loader]
    if HOW == "save":
        for batch in batches[:5]:
            step(accelerator, model, optimizer, scheduler, batch)
        accelerator.save_state(str(folder))
    else:
        accelerator.load_state(str(folder))
    rest = [step(accelerator, model, optimizer, scheduler, batch) for batch in batches[5:]]
    record(f"going on, {name}", lambda: rest)
    record(f"steps, {name}", lambda: model.global_steps)


def start() -> None:
    """Without GPUs, 1.15 does not see that there are more processes."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    state = PartialState()
    if state.num_processes != WORLD:
        state.num_processes, state.process_index, state.local_process_index = WORLD, RANK, RANK


if __name__ == "__main__":
    start()
    if HOW == "train":
        for name, settings in CONFIGURATIONS.items():
            fill(name, settings)
        for name, settings in RUNS.items():
            losses(name, settings)
        for stage in STAGES:
            results(stage, gathers=True, precision="no")
            results(stage, gathers=True, precision="bf16")
        results(3, gathers=False, precision="no")
    else:
        for stage in STAGES:
            state(stage, "no", schedule=True, dummies=False)
            state(stage, "bf16", schedule=False, dummies=False)
        for stage in (2, 3):
            state(stage, "no", schedule=True, dummies=True)
    done()
    Accelerator().end_training()
