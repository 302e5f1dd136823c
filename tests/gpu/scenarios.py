"""What is tried on one real GPU, each as a function of a device: the same functions run on the CPU and on a pretended GPU."""

from __future__ import annotations

import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, default_collate

from accel_bigmodel import cpu_offload
from accel_ops.collectives.gathering import gather_leaves
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    broadcast,
    find_executable_batch_size,
    gather_object,
    reduce,
)
from tests.support.tiny_transformer import Tokens, make_loader, make_model, shift, token_loss

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
        actual = gather_leaves(many, "gather", PartialState())
        assert torch.equal(actual["a"], x)
        assert actual["b"][2].dtype == torch.bfloat16
        assert actual["c"].shape == (1,)
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
    """What a profiler sees between the first and the last of ten gathers of one number: names of operations and CUDA calls.

    The profiler itself waits for the device when it stops, so what comes after the gathers says nothing about them.
    """
    with group_of_one():
        accelerator = accelerator_for(device)
        number = torch.ones((), device=accelerator.device)
        for _ in range(3):
            gather_leaves(number, "gather", PartialState())
        with torch.profiler.profile() as profile, torch.profiler.record_function("ten gathers"):
            for _ in range(10):
                gather_leaves(number, "gather", PartialState())
        return names_within(profile.events(), "ten gathers")


def names_within(events: Any, name: str) -> list[str]:
    """The names of a profiler's events that begin within the time of another one on the host."""
    on_host = torch.autograd.DeviceType.CPU
    span = next(event.time_range for event in events if event.name == name and event.device_type == on_host)
    inside = [event for event in events if span.start <= event.time_range.start <= span.end]
    return [event.name for event in inside if event.name != name]


def saves_in_the_background(device: str, engine: str, folder: Path) -> None:
    """A save in the background holds the moment of its call, while training changes what it saves."""
    with group_of_one():
        accelerator = accelerator_for(device, engine)
        prepared = prepare(accelerator)
        train(accelerator, prepared, 2)
        for _ in range(2):  # the second one reuses the memory of the first
            saving = accelerator.save_state(str(folder / "state"), async_save=True)
            expected = train(accelerator, prepared, 2)
            assert Path(saving.result()) == folder / "state"
            accelerator.load_state(str(folder / "state"))
            assert train(accelerator, prepared, 2) == expected
        accelerator.load_state(str(folder / "state"))
        accelerator.save_state(str(folder / "again"))
        if engine == "single":
            weights = [(folder / name / "model.safetensors").read_bytes() for name in ("state", "again")]
            assert weights[0] == weights[1]
        accelerator.end_training()


def in_own_process(scenario: Callable[..., None], *arguments: Any) -> None:
    """Run a scenario in a process of its own: DeepSpeed leaves functions of torch replaced."""
    process = multiprocessing.get_context("spawn").Process(target=scenario, args=arguments)
    process.start()
    process.join(300)
    assert process.exitcode == 0


def zero3_with_offload(device: str, folder: Path) -> None:
    """ZeRO 3 whose parameters and optimizer states are in CPU memory trains, and resumes from its checkpoint."""
    in_cpu_memory = {"device": "cpu"}
    config = {
        "zero_optimization": {"stage": 3, "offload_param": in_cpu_memory, "offload_optimizer": in_cpu_memory},
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own Adam would be compiled for minutes
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
    }
    with group_of_one(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DeepSpeed
        accelerator = accelerator_for(device, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        prepared = prepare(accelerator)
        losses = train(accelerator, prepared, 8)
        assert losses[-1] < losses[0]
        accelerator.save_state(str(folder / "state"))
        expected = train(accelerator, prepared, 2)
        accelerator.load_state(str(folder / "state"))
        assert train(accelerator, prepared, 2) == expected
        accelerator.free_memory()


def as_tensors(samples: list[Any]) -> Any:
    """A batch that is a tuple of tensors."""
    batch = default_collate(samples)
    return batch["input_ids"], batch["labels"]


def as_encoding(samples: list[Any]) -> Any:
    """A batch as tokenizers of transformers return it."""
    from transformers import BatchEncoding

    return BatchEncoding(default_collate(samples))


FORMS: dict[str, Callable[[list[Any]], Any]] = {
    "tensors": as_tensors,
    "dicts": default_collate,
    "BatchEncodings": as_encoding,
}


@contextmanager
def error_on_waits(device: str) -> Iterator[None]:
    """Operations that make the host wait for the GPU raise an error."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def epochs_without_waiting(
    device: str, form: str, watch: Callable[[str], AbstractContextManager[Any]] = error_on_waits
) -> None:
    """A whole epoch in which the host never waits for the GPU, after one in which it may.

    Args:
        device: "cpu" or "cuda".
        form: Of batches, from `FORMS`.
        watch: Raises where the host waits for the device.
    """
    try:
        accelerator = accelerator_for(device, mixed_precision="bf16", gradient_accumulation_steps=2)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        loader = DataLoader(Tokens(22), batch_size=4, collate_fn=FORMS[form], pin_memory=device != "cpu")
        prepared = accelerator.prepare(model, optimizer, scheduler, loader)
        losses: list[torch.Tensor] = []
        for epoch in range(2):
            with watch(device) if epoch else nullcontext():
                losses += losses_of_epoch(accelerator, *prepared)
        assert len(losses) == 12
        assert float(losses[-1].mean()) < float(losses[0].mean())
    finally:
        forget()


def losses_of_epoch(
    accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, loader: Any
) -> list[torch.Tensor]:
    """Train an epoch as programs do; the losses stay on the device."""
    losses = []
    for batch in loader:
        tokens, labels = batch if isinstance(batch, (tuple, list)) else (batch["input_ids"], batch["labels"])
        with accelerator.accumulate(model):
            logits = model(tokens)
            loss = token_loss(logits, shift(labels))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        predictions, _ = accelerator.gather_for_metrics((logits.detach().argmax(-1), labels))
        assert predictions.shape == labels.shape
        losses.append(loss.detach())
    return losses


MOST_SAMPLES = 48  # which have room in memory
SAMPLE_BYTES = 32 << 20
GRANULE = 2 << 20  # to which the caching allocator rounds large blocks


def batch_sizes_until_one_fits(device: str, *, whole_gpu: bool = False) -> list[int]:
    """The batch sizes that are tried until one fits into memory, which really runs out.

    Args:
        device: "cpu" or "cuda".
        whole_gpu: Fill all of the GPU's memory, and not only a part that this process limits itself to.
    """
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=64)
    def allocate(batch_size: int) -> None:
        tried.append(batch_size)
        samples = []
        for index in range(batch_size):
            has_room = device != "cpu" or index < MOST_SAMPLES  # the CPU's memory is not filled
            samples.append(torch.empty(num_bytes if has_room else 1 << 60, dtype=torch.uint8, device=device))

    with limited_memory(device, whole_gpu) as num_bytes:
        allocate()
    return tried


@contextmanager
def limited_memory(device: str, whole_gpu: bool) -> Iterator[int]:
    """Memory in which `MOST_SAMPLES` samples have room; the bytes of one. Whatever was allocated in it is gone afterwards."""
    if device == "cpu":
        yield 1
        return
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    free, total = torch.cuda.mem_get_info()
    try:
        if whole_gpu:
            yield free // MOST_SAMPLES // GRANULE * GRANULE
        else:
            limit = torch.cuda.memory_reserved() + MOST_SAMPLES * SAMPLE_BYTES
            torch.cuda.set_per_process_memory_fraction(limit / total)
            yield SAMPLE_BYTES
        gc.collect()
        assert torch.cuda.memory_allocated() == before
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
