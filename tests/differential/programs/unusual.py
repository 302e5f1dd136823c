"""Loaders, optimizers and arguments that are rarely seen: what 1.15 takes is taken, and does the same."""

from __future__ import annotations

import collections
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from record import done, record
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate import utils as U
from accelerate.state import AcceleratorState, GradientState

NUMBERS = torch.arange(6.0)

# ---- loaders --------------------------------------------------------------------------------------------------------


class Scaled(DataLoader):
    """With a constructor of its own."""

    def __init__(self, data: Any, factor: float, **options: Any) -> None:
        super().__init__(data, **options)
        self.factor = factor

    def __iter__(self) -> Iterator[Any]:
        return (batch * self.factor for batch in super().__iter__())


class SaysTwo(DataLoader):
    def __len__(self) -> int:
        return 2


class Uneven:
    """Batches of indices that belong to no class of torch."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1], [2], [3, 4, 5])

    def __len__(self) -> int:
        return 3


class Endless(Sampler):
    def __init__(self) -> None:
        """Nothing to keep."""

    def __iter__(self) -> Iterator[Any]:
        yield from ([0, 1], [2, 3])


class Chosen(Endless):
    def __iter__(self) -> Iterator[Any]:
        return iter([5, 3, 1, 0])


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(float(number)) for number in range(7))


class StreamOfEpochs(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(float(number + 10 * self.epoch)) for number in range(5))


class Rows(Dataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor(float(index)), "text": str(index), "index": index, "array": np.ones(2) * index}


@dataclass
class Batch:
    values: torch.Tensor


Pair = collections.namedtuple("Pair", "values count")
LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "plain": lambda: DataLoader(NUMBERS, batch_size=4),
    "items": lambda: DataLoader(NUMBERS, batch_size=None),
    "ready batches": lambda: DataLoader(NUMBERS.split(2), batch_size=None),
    "subclass": lambda: Scaled(NUMBERS, 3, batch_size=4),
    "own length": lambda: SaysTwo(NUMBERS, batch_size=4),
    "own batches": lambda: DataLoader(NUMBERS, batch_sampler=Uneven()),
    "batches without length": lambda: DataLoader(NUMBERS, batch_sampler=Endless()),
    "sampler without length": lambda: DataLoader(NUMBERS, sampler=Chosen(), batch_size=3),
    "list of indices": lambda: DataLoader(NUMBERS, sampler=[4, 2, 0], batch_size=2),
    "list of batches": lambda: DataLoader(NUMBERS, batch_sampler=[[0], [1, 2]]),
    "stream": lambda: DataLoader(Stream(), batch_size=3),
    "stream, drop_last": lambda: DataLoader(Stream(), batch_size=3, drop_last=True),
    "epochs": lambda: DataLoader(StreamOfEpochs(), batch_size=2),
    "dataclass": lambda: DataLoader(NUMBERS, batch_size=3, collate_fn=lambda rows: Batch(torch.stack(rows))),
    "named tuple": lambda: DataLoader(
        NUMBERS, batch_size=3, collate_fn=lambda rows: Pair(torch.stack(rows), len(rows))
    ),
    "rows": lambda: DataLoader(Rows(), batch_size=2),
    "text": lambda: DataLoader(["a", "b", "c"], batch_size=2),
    "nothing": lambda: DataLoader(NUMBERS, batch_size=3, collate_fn=lambda rows: None),
    "numbers": lambda: DataLoader([1, 2, 3], batch_size=2, collate_fn=list),
    "workers": lambda: DataLoader(NUMBERS, batch_size=2, num_workers=1, persistent_workers=True),
    "weighted": lambda: DataLoader(NUMBERS, batch_size=2, sampler=WeightedRandomSampler([1.0] + 5 * [0.0], 4)),
    "subset": lambda: DataLoader(Subset(TensorDataset(NUMBERS), [1, 3]), batch_size=1),
    "joined": lambda: DataLoader(ConcatDataset([TensorDataset(NUMBERS), TensorDataset(NUMBERS)]), batch_size=5),
    "chained": lambda: DataLoader(ChainDataset([Stream(), Stream()]), batch_size=5),
    "stacked": lambda: DataLoader(StackDataset(NUMBERS, NUMBERS), batch_size=4),
    "mixed": lambda: DataLoader(NUMBERS, batch_size=3, collate_fn=lambda rows: (torch.stack(rows), "x", 3, None, [1])),
}
ATTRIBUTES = ("batch_size", "drop_last", "num_workers", "total_dataset_length", "remainder", "prefetch_factor")


def loaders() -> None:
    accelerator = Accelerator(cpu=True)
    dispatching = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    state = accelerator.gradient_state
    for name, make in LOADERS.items():
        record(f"{name}: batches", lambda make=make: list(accelerator.prepare(make())))
        record(
            f"{name}: second epoch", lambda make=make: [list(loader) for loader in 2 * [accelerator.prepare(make())]]
        )
        record(f"{name}: skipped", lambda make=make: list(skip_first_batches(accelerator.prepare(make()), 1)))
        record(f"{name}: length", lambda make=make: len(accelerator.prepare(make())))
        record(
            f"{name}: gathered", lambda make=make: [*map(accelerator.gather_for_metrics, accelerator.prepare(make()))]
        )
        record(f"{name}: dispatched", lambda make=make: list(dispatching.prepare(make())))
        record(f"{name}: ends", lambda make=make: [state.end_of_dataloader for _ in accelerator.prepare(make())])
        for attribute in ATTRIBUTES:
            record(
                f"{name}: {attribute}", lambda make=make, a=attribute: getattr(accelerator.prepare(make()), a, None)
            )


# ---- optimizers and schedulers --------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "in turn": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[2],
    ),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 3]),
}
INPUTS = torch.arange(8.0).view(4, 2) / 8


def new_pair(kind: Any = optim.SGD) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return model, kind(model.parameters(), lr=0.1)


def scheduled(make: Callable[[Any], Any], num_steps: int) -> Any:
    """Learning rates and weights over seven batches."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
    model, optimizer = new_pair()
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, make(optimizer))
    rates = []
    for _ in range(7):
        with accelerator.accumulate(model):
            accelerator.backward(model(INPUTS).square().mean())
            optimizer.step()
            needs_loss = isinstance(scheduler.scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*[1.0] * needs_loss)
            optimizer.zero_grad()
        rates.append((optimizer.param_groups[0]["lr"], *map(float, scheduler.get_last_lr())))
    return rates, list(model.parameters())


def closure() -> Any:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*new_pair(optim.LBFGS))

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(INPUTS).square().mean()
        accelerator.backward(value)
        return value

    for _ in range(2):
        optimizer.step(loss)  # 1.15 returns None
    return list(model.parameters())


def later_group() -> Any:
    model, optimizer = Accelerator(cpu=True).prepare(*new_pair())
    late = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    (model(INPUTS).sum() + late.sum()).backward()
    optimizer.step()
    return late, list(model.parameters()), [group["lr"] for group in optimizer.param_groups]


def went_back() -> Any:
    model, optimizer = Accelerator(cpu=True).prepare(*new_pair(optim.AdamW))
    model(INPUTS).sum().backward()
    optimizer.step()
    kept = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    optimizer.load_state_dict(kept)
    return sorted(kept), optimizer.state_dict()["state"][0]["step"], optimizer.defaults["lr"]


def two_of_each() -> Any:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    (first, a), (second, b) = new_pair(), new_pair(optim.Adam)
    first, second, a, b = accelerator.prepare(first, second, a, b)
    for _ in range(4):
        with accelerator.accumulate(first, second):
            accelerator.backward(second(INPUTS).sum() * first(INPUTS).mean())
            for optimizer in (a, b):
                optimizer.step()
                optimizer.zero_grad()
    return list(first.parameters()), list(second.parameters())


def optimizers() -> None:
    for name, make in SCHEDULERS.items():
        for num_steps in (1, 3):
            record(f"{name} over {num_steps}", lambda make=make, count=num_steps: scheduled(make, count))
    for see in (closure, later_group, went_back, two_of_each):
        record(see.__name__, see)


# ---- arguments ------------------------------------------------------------------------------------------------------


def arguments() -> None:
    """Whether a call runs at all; what it returns is compared elsewhere."""
    accelerator = Accelerator(cpu=True)
    values: dict[str, Any] = {
        "float": 3.0, "int": 3, "none": None, "text": "abc", "list": [1, 2], "empty": [], "tuple": (1, "a"),
        "dictionary": {"a": 1}, "array": np.ones(3), "object": object(), "mixed": {"a": torch.ones(2), "b": "x"},
        "tensor": torch.ones(3), "scalar": torch.tensor(1.0), "set": {1}, "true": True, "range": range(3),
        "user dictionary": collections.UserDict(a=torch.ones(1)),
    }  # fmt: skip
    calls: dict[str, Callable[[Any], Any]] = {
        "gather": accelerator.gather, "gather_for_metrics": accelerator.gather_for_metrics,
        "gather_objects": lambda value: accelerator.gather_for_metrics(value, use_gather_object=True),
        "reduce": accelerator.reduce, "pad": accelerator.pad_across_processes, "gather_object": U.gather_object,
        "broadcast": U.broadcast, "broadcast_object_list": U.broadcast_object_list, "log": accelerator.log,
        "log at": lambda value: accelerator.log({"a": 1}, step=value), "init_trackers": accelerator.init_trackers,
        "send": lambda value: U.send_to_device(value, "cpu"), "find_device": U.find_device, "listify": U.listify,
        "find_batch_size": U.find_batch_size, "unwrap": accelerator.unwrap_model, "prepare": accelerator.prepare,
        "free": accelerator.free_memory, "release": U.release_memory, "structure": U.get_data_structure,
        "register": accelerator.register_for_checkpointing, "clip": lambda value: accelerator.clip_grad_norm_(value, 1.0),
        "fp32": U.convert_to_fp32, "wait": lambda value: accelerator.wait_for_everyone(), "seed": U.set_seed,
    }  # fmt: skip
    for called, call in calls.items():
        for name, value in values.items():
            record(f"{called}({name})", lambda call=call, value=value: (call(value), "runs")[1])
    settings: dict[str, tuple[Any, list[Any]]] = {
        "split_batches": (U.DataLoaderConfiguration, [0, 1, np.bool_(True), None, "true"]),
        "find_unused_parameters": (U.DistributedDataParallelKwargs, [0, 1, np.bool_(False)]),
        "num_steps": (U.GradientAccumulationPlugin, [2.0, np.int64(2)]),
        "total_limit": (U.ProjectConfiguration, [2.0, None]),
        "growth_interval": (U.GradScalerKwargs, [100.0]),
        "timeout": (U.InitProcessGroupKwargs, [30, 0.5]),
    }
    for field, (made, given) in settings.items():
        for value in given:
            record(
                f"{field}={value!r}", lambda made=made, field=field, value=value: (made(**{field: value}), "runs")[1]
            )


if __name__ == "__main__":
    for part in (loaders, optimizers, arguments):
        if part.__name__ in sys.argv[1:]:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            part()
    done()
