"""Torch still says what the headings of the troubleshooting page quote, in programs that use this library."""

from __future__ import annotations

import copy
import os
import re
import signal
import socket
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accelerate import (
    Accelerator,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    init_empty_weights,
)
from accelerate.state import AcceleratorState
from tests.support.ranks import ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
NEEDS_A_GPU = {
    "Expected all tensors to be on the same device",
    "CUDA out of memory",
    "CUDA error: device-side assert triggered",
    "CUDA error: no kernel image is available for execution on the device",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cannot re-initialize CUDA in forked subprocess",
    "Attempting to deserialize object on a CUDA device",
    "Found no NVIDIA driver on your system",
    "NCCL error ... unhandled",
    "Watchdog caught collective operation timeout",
    "No backend type associated with device type cpu",
}
NOT_PROVOKED_HERE = {  # they end processes, take as long as a timeout, or are written by C++
    "Connection closed by peer",
    "Timed out waiting ...ms for",
    "find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters",
    "insufficient shared memory (shm)",
    "Too many open files",
    "The loss is nan",
}


def pattern(heading: str) -> str:
    return ".*".join(map(re.escape, re.split(r"\s*\.\.\.\s*", heading)))


def new_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def batch() -> torch.Tensor:
    return torch.randn(2, 4)


def trained(mixed_precision: str = "no", dtype: torch.dtype = torch.float32) -> tuple[Accelerator, Any, Any, Any]:
    """An accelerator, a model and an optimizer after a backward pass, and the loss."""
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    model = new_model().to(dtype)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(batch().to(dtype)).sum()
    accelerator.backward(loss)
    return accelerator, model, optimizer, loss


class Samples(Dataset[torch.Tensor]):
    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.read()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def read_first(samples: Any, **options: Any) -> None:
    next(iter(Accelerator(cpu=True).prepare(DataLoader(samples, **options))))


def fail() -> None:
    raise ValueError("a broken sample")


def load_with_prefix(prefix: str) -> None:
    new_model().load_state_dict({prefix + name: tensor for name, tensor in new_model().state_dict().items()})


def loss_without_gradient() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(new_model())
    with torch.no_grad():
        loss = model(batch()).sum()
    accelerator.backward(loss)


def backward_twice() -> None:
    accelerator, _, _, loss = trained()
    accelerator.backward(loss)


def backward_of_many() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.backward(accelerator.prepare(new_model())(batch()))


def activation_changed_in_place() -> None:
    outputs = torch.sigmoid(new_model()(batch()))
    outputs += 1
    outputs.sum().backward()


def train_on_inference_tensors() -> None:
    with torch.inference_mode():
        inputs = batch()
    new_model()(inputs).sum().backward()


def find_nan() -> None:
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings(action="ignore"):
        (torch.sqrt(torch.zeros(1, requires_grad=True)) * 0).sum().backward()


def clip_16_bit_gradients() -> None:
    accelerator, model, _, _ = trained("fp16", torch.float16)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)


def unscale_twice() -> None:
    accelerator, model, optimizer, _ = trained("fp16")
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    accelerator.scaler.unscale_(optimizer.optimizer)


def step_with_a_scaler_of_the_program() -> None:
    model = new_model()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))


def load_optimizer(*groups: nn.Module) -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    saved = torch.optim.Adam([{"params": model[number].parameters()} for number in range(len(groups))]).state_dict()
    torch.optim.Adam(model.parameters()).load_state_dict(saved)


def use_half_a_file() -> None:
    from safetensors.torch import load, save

    content = save({"weight": torch.ones(1000)})
    load(content[: len(content) // 2])


def save_shared_tensors() -> None:
    from safetensors.torch import save_file

    weight = torch.ones(3)
    save_file({"encoder": weight, "decoder": weight}, "model.safetensors")


def load_objects() -> None:
    torch.save(new_model(), "model.pt")
    torch.load("model.pt")  # noqa: TID251


def move_empty_model() -> None:
    with init_empty_weights():
        model = new_model()
    Accelerator(cpu=True).prepare(model)


def step_scheduler_first() -> None:
    optimizer = torch.optim.SGD(new_model().parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1).step()


def listen_twice() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        dist.TCPStore("127.0.0.1", taken.getsockname()[1], 1, is_master=True, use_libuv=True)


def parameters_in_two_groups() -> None:
    model = new_model()
    torch.optim.SGD([{"params": model.parameters()}, {"params": model[0].parameters()}], lr=0.1)  # type: ignore[index]


ON_ONE_PROCESS: dict[str, Callable[[], Any]] = {
    "element 0 of tensors does not require grad and does not have a grad_fn": loss_without_gradient,
    "Trying to backward through the graph a second time": backward_twice,
    "grad can be implicitly created only for scalar outputs": backward_of_many,
    "one of the variables needed for gradient computation has been modified by an inplace operation": activation_changed_in_place,
    "a leaf Variable that requires grad is being used in an in-place operation": lambda: new_model()[0].weight.add_(1),  # type: ignore[index]
    "Inference tensors cannot be saved for backward": train_on_inference_tensors,
    "Function '...' returned nan values": find_nan,
    "None of the inputs have requires_grad=True. Gradients will be None": lambda: checkpoint(
        new_model(), batch(), use_reentrant=True
    ),
    "the use_reentrant parameter should be passed explicitly": lambda: checkpoint(new_model(), batch()),
    "Default process group has not been initialized": lambda: dist.all_reduce(torch.ones(1)),
    "The server socket has failed to listen ... address already in use": listen_twice,
    "mat1 and mat2 must have the same dtype": lambda: new_model().bfloat16()(batch()),
    "expected m1 and m2 to have the same dtype": lambda: batch() @ torch.ones(4, 4).bfloat16(),
    "Input type (...) and ... type (...) should be the same": lambda: nn.Conv2d(1, 1, 1).half()(torch.ones(1, 1, 2, 2)),
    "Attempting to unscale FP16 gradients": clip_16_bit_gradients,
    "unscale_() has already been called on this optimizer": unscale_twice,
    "No inf checks were recorded for this optimizer": step_with_a_scaler_of_the_program,
    "result type Float can't be cast to the desired output type Long": lambda: F.binary_cross_entropy_with_logits(
        new_model()(batch()), torch.ones(2, 1).long()
    ),
    "Got unsupported ScalarType BFloat16": lambda: torch.ones(1).bfloat16().numpy(),
    "Missing key(s) in state_dict": partial(load_with_prefix, "module."),
    "Unexpected key(s) in state_dict": partial(load_with_prefix, "_orig_mod."),
    "size mismatch for ...: copying a param with shape": lambda: nn.Linear(4, 2).load_state_dict(
        nn.Linear(4, 3).state_dict()
    ),
    "Weights only load failed": load_objects,
    "Error while deserializing": use_half_a_file,
    "Some tensors share memory": save_shared_tensors,
    "loaded state dict has a different number of parameter groups": lambda: load_optimizer(nn.Linear(1, 1), nn.Linear(1, 1)),
    "loaded state dict contains a parameter group that doesn't match the size of optimizer's group": lambda: load_optimizer(
        nn.Linear(1, 1)
    ),
    "Cannot copy out of meta tensor; no data": move_empty_model,
    "stack expects each tensor to be equal size": lambda: read_first([torch.ones(1), torch.ones(2)], batch_size=2),
    "default_collate: batch must contain tensors, numpy arrays": lambda: read_first([None, None], batch_size=2),
    "Caught ... in DataLoader worker process": lambda: read_first(Samples(fail), num_workers=1),
    "DataLoader worker (pid ...": lambda: read_first(
        Samples(lambda: os.kill(os.getpid(), signal.SIGKILL)), num_workers=1
    ),
    "Can't ... local object": lambda: read_first([1], num_workers=1, multiprocessing_context="spawn", collate_fn=lambda x: x),
    "object of type '...' has no len()": lambda: len(Accelerator(cpu=True).prepare(DataLoader(Stream()))),
    "DataLoader with IterableDataset: expected unspecified shuffle option": lambda: DataLoader(Stream(), shuffle=True),
    "Expected more than 1 value per channel when training": lambda: nn.BatchNorm1d(3)(torch.ones(1, 3)),
    "index out of range in self": lambda: nn.Embedding(3, 2)(torch.tensor([5])),
    "Target ... is out of bounds": lambda: F.cross_entropy(torch.ones(1, 3), torch.tensor([3])),
    "mat1 and mat2 shapes cannot be multiplied": lambda: new_model()(torch.ones(2, 5)),
    "Can't call numpy() on Tensor that requires grad": lambda: new_model()(batch()).numpy(),
    "Detected call of `lr_scheduler.step()` before `optimizer.step()`": step_scheduler_first,
    "optimizer got an empty parameter list": lambda: torch.optim.SGD([], lr=0.1),
    "can't optimize a non-leaf Tensor": lambda: torch.optim.SGD([torch.ones(1, requires_grad=True) * 2], lr=0.1),
    "some parameters appear in more than one parameter group": parameters_in_two_groups,
}  # fmt: skip


class Branches(nn.Module):
    """A model that uses another layer from its second forward pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.first(inputs) if self.calls < 2 else self.second(inputs)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(4, 4), new_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.rest, self.first(inputs), use_reentrant=True)


def replicate(model: nn.Module, steps: int = 0, **options: Any) -> nn.Module:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    replica = accelerator.prepare(model)
    for _ in range(steps):
        accelerator.backward(replica(batch()).sum())
    return replica


def shard(model: nn.Module, version: int = 2) -> nn.Module:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy="no_wrap")
    return Accelerator(cpu=True, fsdp_plugin=plugin).prepare(model)


def shard_two_dtypes(version: int) -> None:
    shard(nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 1)), version)(batch())


ON_TWO_PROCESSES: dict[str, Callable[[int], Any]] = {
    "'DistributedDataParallel' object has no attribute": lambda rank: replicate(Branches()).calls,
    "Expected to have finished reduction in the prior iteration": lambda rank: replicate(Branches(), steps=2),
    "Expected to mark a variable ready only once": lambda rank: replicate(
        Checkpointed(), steps=1, find_unused_parameters=True
    ),
    "Your training graph has changed in this iteration": lambda rank: replicate(Branches(), steps=3, static_graph=True),
    "DDP expects same model across all ranks": lambda rank: replicate(new_model() if rank else nn.Linear(4, 1)),
    "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient": (
        lambda rank: nn.parallel.DistributedDataParallel(nn.ReLU())
    ),
    "trying to initialize the default process group twice": lambda rank: dist.init_process_group("gloo"),
    "got mixed torch.Tensor and DTensor": lambda rank: F.linear(batch(), shard(new_model())[0].weight),  # type: ignore[index]
    "FSDP expects uniform original parameter dtype": lambda rank: shard_two_dtypes(2),
    "Must flatten tensors with uniform dtype": lambda rank: shard_two_dtypes(1),
    "FSDP does not support deepcopy": lambda rank: copy.deepcopy(shard(new_model())),
}  # fmt: skip


@pytest.mark.parametrize(("heading", "provoke"), ON_ONE_PROCESS.items(), ids=list(ON_ONE_PROCESS))
def test_on_one_process(
    heading: str, provoke: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        said = ""
        try:
            provoke()
        except Exception as error:
            said = str(error)
    assert re.search(pattern(heading), "\n".join([said, *(str(warning.message) for warning in warned)]), re.DOTALL)


@ranks(2, timeout=600)
def test_on_two_processes(rank: int) -> None:
    for heading, provoke in ON_TWO_PROCESSES.items():
        AcceleratorState._reset_state()
        with pytest.raises((RuntimeError, ValueError, AttributeError, AssertionError)) as raised:
            provoke(rank)
        assert re.search(pattern(heading), str(raised.value), re.DOTALL), heading
        dist.barrier()


def test_the_headings_are_those_of_the_page() -> None:
    page = PAGE.read_text().partition("## Messages of torch")[2]
    entries = re.findall(r"^### (.*)$", page, re.MULTILINE)
    assert sorted(entries) == sorted([*ON_ONE_PROCESS, *ON_TWO_PROCESSES, *NEEDS_A_GPU, *NOT_PROVOKED_HERE])
    assert len(ON_ONE_PROCESS | ON_TWO_PROCESSES) >= 40
