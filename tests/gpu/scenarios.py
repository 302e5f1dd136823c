"""What is tried on one real GPU, each as a function of a device: the same functions run on the CPU and on a pretended GPU."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel_bigmodel import cpu_offload
from accel_ops.gathering import gather_leaves
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin, InitProcessGroupKwargs, broadcast, gather_object, reduce
from tests.support.tiny_transformer import make_loader, make_model, shift, token_loss

LEARNING_RATE = 1e-2
ENGINES: dict[str, dict[str, Any]] = {
    "single": {},
    "ddp": {},
    "fsdp1": {"fsdp_version": 1},
    "fsdp1 offload": {"fsdp_version": 1, "cpu_offload": True},
    "fsdp2": {"fsdp_version": 2},
    "fsdp2 offload": {"fsdp_version": 2, "cpu_offload": True},
    "fsdp2 full states": {"fsdp_version": 2, "state_dict_type": "full_state_dict"},
    "fsdp2 offload, full states": {"fsdp_version": 2, "cpu_offload": True, "state_dict_type": "full_state_dict"},
}


@contextmanager
def group_of_one(world: int = 1) -> Iterator[None]:
    """The environment of a launch of one process, whose group is closed afterwards."""
    before = dict(os.environ)
    os.environ.update(
        RANK="0", WORLD_SIZE=str(world), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    try:
        yield
    finally:
        forget()
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def forget() -> None:
    """Close the group and reset the states, as at the end of a program."""
    if dist.is_initialized():
        PartialState().destroy_process_group()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def accelerator_for(device: str, engine: str = "single", **options: Any) -> Accelerator:
    """An accelerator of one engine on a device: "cpu" or "cuda"."""
    plugin = ENGINES[engine]
    if plugin:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(**plugin)
    return Accelerator(cpu=device == "cpu", **options)


def train(accelerator: Accelerator, prepared: tuple[Any, ...], steps: int) -> list[float]:
    """The losses of some steps."""
    model, optimizer, loader = prepared
    losses = []
    for batch, _ in zip(loader, range(steps), strict=False):
        loss = token_loss(model(batch["input_ids"]), shift(batch["labels"]))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def prepare(accelerator: Accelerator) -> tuple[Any, ...]:
    """Model, optimizer and loader."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    prepared: tuple[Any, ...] = accelerator.prepare(model, optimizer, make_loader(4))
    return prepared


# ---- scenarios ------------------------------------------------------------------------------------------------------


def collectives_of_one_rank(device: str) -> None:
    """Collectives go through the backend, although they bring nothing new."""
    with group_of_one():
        accelerator = accelerator_for(device)
        state = accelerator.state
        assert dist.get_backend() == ("nccl" if accelerator.device.type == "cuda" else "gloo")
        x = torch.arange(6.0, device=accelerator.device).view(3, 2)
        many = {"a": x, "b": [x.to(torch.int64), x.bool(), x.to(torch.bfloat16)], "c": x.sum()}
        found = gather_leaves(many, "gather", PartialState())
        assert torch.equal(found["a"], x)
        assert found["b"][2].dtype == torch.bfloat16
        assert found["c"].shape == (1,)
        large = torch.arange(100_000, device=accelerator.device)
        assert torch.equal(gather_leaves(large, "gather", PartialState()), large)
        assert torch.equal(reduce(x, "sum"), x)
        assert torch.equal(broadcast(x.clone()), x)
        assert gather_object(["one"]) == ["one"]
        state.wait_for_everyone()


def saves_and_loads(device: str, engine: str, folder: Path) -> None:
    """What is loaded trains on as what was saved did."""
    with group_of_one(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has much to say about FSDP 1 on one rank
        accelerator = accelerator_for(device, engine)
        prepared = prepare(accelerator)
        train(accelerator, prepared, 2)
        accelerator.save_state(str(folder / "state"))
        expected = train(accelerator, prepared, 2)
        accelerator.load_state(str(folder / "state"))
        assert train(accelerator, prepared, 2) == expected
        accelerator.save_model(prepared[0], str(folder / "model"))
        state = accelerator.get_state_dict(prepared[0])
        assert {name for name in state} == {name for name in make_model().state_dict()}


def losses_in(device: str, precision: str) -> list[float]:
    """The losses of ten steps."""
    try:
        accelerator = accelerator_for(device, mixed_precision=precision)
        return train(accelerator, prepare(accelerator), 10)
    finally:
        forget()


def ranks_that_share_a_gpu(rank: int, world: int, device: str, store: str, results: Any) -> None:
    """The body of one of several processes on one device, which gloo connects: NCCL takes one rank for each GPU."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )  # fmt: skip
    handler = InitProcessGroupKwargs(backend="gloo", init_method=f"file://{store}")
    accelerator = accelerator_for(device, kwargs_handlers=[handler])
    own = torch.full((2,), float(rank), device=accelerator.device)
    gathered = accelerator.gather(own)
    assert gathered.device == own.device
    total = accelerator.reduce(own, "sum")
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, device=accelerator.device))
    prepared = prepare(accelerator)
    results.put((rank, gathered.tolist(), total.tolist(), list(padded.shape), train(accelerator, prepared, 3)))
    accelerator.end_training()


class Slow(nn.Module):
    """Layers whose weights are copied ahead of their use."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def deleted_while_copying(device: str, width: int = 2048, rounds: int = 3) -> None:
    """Memory of a streamed model that is deleted holds what its new owner writes, whatever was on its way."""
    for _ in range(rounds):
        model = cpu_offload(Slow(width, 6), torch.device(device))
        with torch.no_grad():
            for _ in range(3):
                model(torch.ones(1, width, device=device))
        del model
        gc.collect()
        mine = [torch.full((width, width), 7.0, device=device) for _ in range(8)]
        if device != "cpu":
            torch.cuda.synchronize()
        assert all(bool((one == 7.0).all()) for one in mine)


def calls_while_gathering(device: str) -> list[str]:
    """What a profiler sees of ten gathers of one number: names of calls of the CUDA runtime."""
    with group_of_one():
        accelerator = accelerator_for(device)
        number = torch.ones((), device=accelerator.device)
        for _ in range(3):
            gather_leaves(number, "gather", PartialState())
        with torch.profiler.profile() as profile:
            for _ in range(10):
                gather_leaves(number, "gather", PartialState())
        return [event.name for event in profile.events()]  # type: ignore[union-attr]
