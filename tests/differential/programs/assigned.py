"""What programs and libraries assign to on accelerators, states and prepared objects, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from record import done, record
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    DistributedType,
    TorchDynamoPlugin,
)

CASES: list[Callable[[], Any]] = []
ONES = torch.ones(1, 2)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(5))


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES.append(function)
    return function


def step(accelerator: Accelerator) -> tuple[nn.Module, Any]:
    """A model and its optimizer, prepared, after a backward pass of gradients of one."""
    model = nn.Linear(2, 2)
    nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(ONES).sum())
    return model, optimizer


def dtypes(accelerator: Accelerator) -> list[torch.dtype]:
    """What a prepared model computes in, by itself and under `autocast`."""
    plain, prepared = nn.Linear(2, 2), accelerator.prepare(nn.Linear(2, 2))
    with accelerator.autocast():
        return [prepared(ONES).dtype, plain(ONES).dtype]


@case
def native_amp_off() -> Any:
    """denoising-diffusion-pytorch."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.native_amp = False
    return accelerator.native_amp, dtypes(accelerator)


@case
def native_amp_on() -> Any:
    accelerator = Accelerator(cpu=True)
    accelerator.native_amp = True
    return accelerator.native_amp, dtypes(accelerator)


@case
def scaler() -> Any:
    """imagen-pytorch."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model, optimizer = step(accelerator)
    scaled = model.weight.grad.tolist()
    optimizer.step()
    return scaled, accelerator.scaler.get_scale(), model.weight.tolist()


@case
def switched_off_scaler() -> Any:
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)
    model, optimizer = step(accelerator)
    optimizer.step()
    return model.weight.tolist()


@case
def even_batches() -> Any:
    accelerator = Accelerator(cpu=True)
    accelerator.even_batches = False
    return accelerator.even_batches, accelerator.dataloader_config.even_batches


@case
def dispatch_batches() -> Any:
    """trl."""
    seen = []
    for dispatched in (True, False):
        accelerator = Accelerator(cpu=True)
        accelerator.dataloader_config.dispatch_batches = dispatched
        for data in (range(5), Stream()):
            loader = accelerator.prepare(DataLoader(data))
            seen.append((type(loader).__name__, [batch.tolist() for batch in loader]))
    return seen, accelerator.dispatch_batches


@case
def split_batches() -> Any:
    accelerator = Accelerator(cpu=True)
    accelerator.dataloader_config.split_batches = True
    return accelerator.split_batches


@case
def accumulation_through_the_plugin() -> Any:
    """ms-swift."""
    accelerator = Accelerator(cpu=True)
    accelerator.gradient_state.plugin_kwargs["num_steps"] = 3
    model, seen = accelerator.prepare(nn.Linear(2, 2)), []
    for _ in range(7):
        with accelerator.accumulate(model):
            seen.append(accelerator.sync_gradients)
    return accelerator.gradient_accumulation_steps, accelerator.gradient_state.num_steps, seen


@case
def accumulation() -> Any:
    accelerator = Accelerator(cpu=True)
    accelerator.gradient_accumulation_steps = 4
    return accelerator.gradient_state.num_steps


@case
def sync_gradients() -> Any:
    """optimum-neuron."""
    accelerator = Accelerator(cpu=True)
    accelerator.gradient_state.sync_gradients = False
    model, optimizer = step(accelerator)
    optimizer.step()
    return model.weight.tolist(), accelerator.sync_gradients


@case
def trackers() -> Any:
    """simpletuner."""
    accelerator = Accelerator(cpu=True)
    accelerator.trackers = []
    accelerator.log({"loss": 1})
    return accelerator.trackers


@case
def distributed_type() -> Any:
    """axolotl, optimum-neuron."""
    seen = []
    for assign in (
        lambda state: state._shared_state.update(distributed_type=DistributedType.MULTI_GPU),
        lambda state: PartialState._shared_state.update(distributed_type=DistributedType.MULTI_GPU),
        lambda state: setattr(state, "distributed_type", DistributedType.MULTI_GPU),
    ):
        forget()
        accelerator = Accelerator(cpu=True)
        assign(accelerator.state)
        everywhere = accelerator, accelerator.state, PartialState()
        seen.append(([each.distributed_type for each in everywhere], accelerator.use_distributed))
    return seen


@case
def distributed_type_of_the_class() -> Any:
    """unsloth."""
    own = Accelerator.distributed_type
    try:
        Accelerator.distributed_type = property(lambda self: DistributedType.NO)
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(nn.Linear(2, 2))
        return accelerator.distributed_type
    finally:
        Accelerator.distributed_type = own


@case
def ddp_handler() -> Any:
    """intel-extension-for-transformers, optimum-habana."""
    accelerator = Accelerator(cpu=True)
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    return accelerator.ddp_handler.to_kwargs()


@case
def arguments_of_compilation() -> Any:
    """unsloth."""
    own, asked = TorchDynamoPlugin.to_kwargs, []
    try:
        TorchDynamoPlugin.to_kwargs = lambda self: asked.append(1) or {"backend": "eager"}
        accelerator = Accelerator(cpu=True, dynamo_backend="eager")
        model = accelerator.prepare(nn.Linear(2, 2))
        return bool(asked), type(model).__name__
    finally:
        TorchDynamoPlugin.to_kwargs = own


@case
def device() -> Any:
    accelerator = Accelerator(cpu=True)
    accelerator.state.device = torch.device("meta")
    return accelerator.device, PartialState().device


@case
def precision() -> Any:
    seen = []
    for before, after in (("bf16", "no"), ("no", "bf16")):
        forget()
        accelerator = Accelerator(cpu=True, mixed_precision=before)
        accelerator.state._mixed_precision = after
        seen.append((accelerator.mixed_precision, accelerator.prepare(nn.Linear(2, 2))(ONES).dtype))
    return seen


@case
def autocast_handler() -> Any:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.autocast_handler = AutocastKwargs(enabled=False)
    return dtypes(accelerator)


@case
def num_processes() -> Any:
    seen = []
    for state in (AcceleratorState, PartialState):
        forget()
        accelerator = Accelerator(cpu=True)
        state().num_processes = 4
        seen.append((accelerator.num_processes, accelerator.state.num_processes, PartialState().num_processes))
    return seen


@case
def steps_of_schedulers() -> Any:
    accelerator = Accelerator(cpu=True)
    accelerator.step_scheduler_with_optimizer = False
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    optimizer.step()
    scheduler.step()
    return scheduler.get_last_lr(), scheduler.step_with_optimizer


@case
def simple_ones() -> Any:
    accelerator = Accelerator(cpu=True, project_dir="first")
    accelerator.device_placement, accelerator.step = False, 5
    accelerator.project_configuration.iteration = 7
    accelerator.project_configuration.project_dir = "second"
    accelerator.rng_types = ["torch"]
    loader = accelerator.prepare(DataLoader(range(4), shuffle=True))
    folders = accelerator.project_dir, accelerator.logging_dir, accelerator.save_iteration
    return accelerator.device_placement, accelerator.step, folders, accelerator.rng_types, loader.rng_types


@case
def flag_tensor() -> Any:
    accelerator = Accelerator(cpu=True)
    accelerator.flag_tensor = torch.tensor(1)
    return accelerator.check_trigger(), accelerator.flag_tensor.item(), accelerator.check_trigger()


@case
def records_of_what_was_prepared() -> Any:
    accelerator = Accelerator(cpu=True)
    accelerator._models.append(nn.Linear(1, 1))
    accelerator._models.clear()
    accelerator.prepare(nn.Linear(2, 2))
    return len(accelerator._models)


@case
def prepared_objects() -> Any:
    accelerator = Accelerator(cpu=True)
    inner = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer, loader, scheduler = accelerator.prepare(inner, DataLoader(range(4), batch_size=2), scheduler)
    optimizer.mark, loader.mark, scheduler.base_lrs = 1, 1, [5.0]
    optimizer.param_groups, optimizer.defaults = optimizer.param_groups, {}
    loader.end_of_dataloader = True
    marked = hasattr(inner, "mark"), hasattr(loader.base_dataloader, "mark")
    return marked, inner.defaults, scheduler.scheduler.base_lrs


def forget() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


if __name__ == "__main__":
    for function in CASES:
        forget()
        record(function.__name__, lambda function=function: repr(function()))
    done()
