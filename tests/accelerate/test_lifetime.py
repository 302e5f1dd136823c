"""What a program lets go of is freed at once: nothing waits for the garbage collector, which may run much later."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel_state.weak import Weak
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, ParallelismConfig, TorchTensorParallelConfig
from tests.support.ranks import ranks
from tests.support.tiny_transformer import TP_PLAN, make_loader, make_model, shift, token_loss

FREED = ("accelerator", "optimizer", "prepared optimizer", "scheduler", "prepared scheduler", "prepared loader")
"""A model under autocast is not among them: its forward, an attribute of its own, refers to it."""


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(4)


@contextmanager
def no_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run(
    folder: Path | None = None, *, trains: bool = True, workers: bool = False, **arguments: Any
) -> dict[str, weakref.ref[Any]]:
    """A run that is over: weak references to what there was."""
    accelerator = Accelerator(cpu=True, **arguments)
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True} if workers else {}
    loader = DataLoader(Samples(), batch_size=2, **options)
    prepared: Any = accelerator.prepare(model, optimizer, scheduler, loader)
    for batch in prepared[3]:
        with accelerator.accumulate(prepared[0]), torch.set_grad_enabled(trains):
            loss = prepared[0](batch).sum()
            if trains:
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(prepared[0].parameters(), 1.0)
                prepared[1].step()
                prepared[2].step()
                prepared[1].zero_grad()
            else:
                accelerator.gather_for_metrics(loss)
    if folder is not None:
        accelerator.save_state(folder / "state")
        accelerator.load_state(folder / "state")
    names = ("prepared model", "prepared optimizer", "prepared scheduler", "prepared loader")
    actual = dict(zip(names, prepared, strict=True))
    actual |= {"accelerator": accelerator, "model": model, "optimizer": optimizer, "scheduler": scheduler}
    return {name: weakref.ref(one) for name, one in actual.items()}


def alive(references: dict[str, weakref.ref[Any]]) -> list[str]:
    return sorted(name for name, reference in references.items() if reference() is not None)


CASES: dict[str, dict[str, Any]] = {
    "training": {},
    "evaluation": {"trains": False},
    "loss scale": {"mixed_precision": "fp16"},
    "accumulation": {"gradient_accumulation_steps": 2},
    "average over windows": {
        "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2, average_over="window")
    },
    "persistent workers": {"workers": True},
    "compiled": {"dynamo_backend": "eager"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_over_leaves_nothing(case: str) -> None:
    run(**CASES[case])  # what torch imports on the way stays
    with no_collection():
        left = alive(run(**CASES[case]))
    assert not set(left) & set(FREED)
    assert "mixed_precision" in CASES[case] or not left


def test_checkpoints_and_hooks_leave_nothing(tmp_path: Path) -> None:
    run(tmp_path)
    with no_collection():
        assert not alive(run(tmp_path))


def test_workers_end_with_the_program_that_let_go_of_them() -> None:
    """Persistent workers that only the garbage collector ends are waited for, 5 s each: their queues go first."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Samples(), batch_size=2, num_workers=1, persistent_workers=True))
    iterator = iter(loader)
    next(iterator)
    workers = loader.base_dataloader._iterator._workers
    with no_collection():
        del accelerator, loader, iterator
        assert not any(worker.is_alive() for worker in workers)


def test_objects_step_without_the_accelerator_that_prepared_them() -> None:
    def prepared() -> Any:
        model = nn.Linear(4, 1)
        return Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    model, optimizer = prepared()
    before = model.weight.clone()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 0.2)


def test_a_weak_reference_says_when_its_object_is_gone() -> None:
    model = nn.Linear(1, 1)
    reference = Weak(model)
    assert reference.get() is reference.find() is model
    copied, other = pickle.loads(pickle.dumps((model, reference)))
    assert other.get() is copied
    del model
    assert reference.find() is pickle.loads(pickle.dumps(reference)).find() is None
    with pytest.raises(ReferenceError, match="Keep a reference"):
        reference.get()


@ranks(2)
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_ranks_leave_nothing(rank: int, world: int, how: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {} if how == "ddp" else {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}
    run(tmp_path, **arguments)
    with no_collection():
        left = alive(run(tmp_path, **arguments))
    assert not set(left) & set(FREED)


LAYOUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "replicas of tensor parallel models": lambda: {
        "parallelism_config": ParallelismConfig(
            tp_size=2, dp_replicate_size=2, tp_handler=TorchTensorParallelConfig(plan=TP_PLAN)
        )
    },
    "sharded tensor parallel models": lambda: {
        "parallelism_config": ParallelismConfig(
            tp_size=2, dp_shard_size=2, tp_handler=TorchTensorParallelConfig(plan=TP_PLAN)
        ),
        "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2),
    },
    "context parallelism": lambda: {
        "parallelism_config": ParallelismConfig(cp_size=2, dp_shard_size=2),
        "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2),
    },
    "replicas of pipelines": lambda: {"parallelism_config": ParallelismConfig(pp_size=2, dp_replicate_size=2)},
    "pipelines of sharded stages": lambda: {
        "parallelism_config": ParallelismConfig(pp_size=2, dp_shard_size=2),
        "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2),
    },
}


def train_in(layout: str) -> list[weakref.ref[Any]]:
    """A step of a parallel model that nobody refers to any more: its linear layers and their parameters."""
    accelerator = Accelerator(cpu=True, **LAYOUTS[layout]())
    model = make_model()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), make_loader(8))
    batch = next(iter(loader))
    accelerator.backward(token_loss(model(batch["input_ids"]), shift(batch["labels"])))
    optimizer.step()
    layers = [part for part in accelerator.unwrap_model(model).modules() if isinstance(part, nn.Linear)]
    return [weakref.ref(part) for layer in layers for part in (layer, *layer.parameters())]


@ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parallel_models_can_be_collected(rank: int, layout: str) -> None:
    """What is registered with autograd must not hold them: the garbage collector does not see it."""
    parts = train_in(layout)
    AcceleratorState._reset_state(True)
    gc.collect()
    assert parts
    assert not [part() for part in parts if part() is not None]
