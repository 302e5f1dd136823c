"""Weights that travel to a GPU while it computes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel.device_map.plan import infer_auto_device_map
from accel_bigmodel.dispatch import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
)
from accel_bigmodel.empty import init_empty_weights
from accel_bigmodel.hooks.user_offload import cpu_offload_with_hook
from accel_bigmodel.streaming.settings import Streaming
from accel_bigmodel.streaming.stream import WeightStream
from accel_bigmodel.weights.load import load_checkpoint_in_model
from accel_bigmodel.weights.write import write_model_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
WIDTH, LAYERS = 256, 8
SETTINGS: list[tuple[int, str | int | None]] = [(2, None), (0, None), (3, "1MB"), (1, 1)]
BODIES = [
    "streams_parts_within_the_budget",
    "gives_gradients_in_any_order",
    "loads_spreads_and_copies",
    "loads_a_large_checkpoint",
    "sends_the_model_before_back",
]


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(LAYERS)])


def inputs() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def expected() -> torch.Tensor:
    with torch.no_grad():
        return build().cuda()(inputs().cuda()).cpu()


def is_right(model: nn.Module) -> bool:
    """Whether four forward passes of a model give what the plain one gives."""
    wanted = expected()
    with torch.no_grad():
        return all(torch.equal(model(inputs().cuda()).cpu(), wanted) for _ in range(4))


# The bodies of the tests are functions, which tests/cuda_shapes runs on a pretended GPU too.


def streams_all(depth: int, budget: str | int | None, folder: Path) -> None:
    """Everything is offloaded, to CPU memory and to the disk."""
    settings = Streaming(depth, budget)
    write_model_folder(build().state_dict(), folder / "model")
    with init_empty_weights():
        empty = build()
    for model in (
        cpu_offload(build(), 0, streaming=settings),
        disk_offload(empty, folder / "model", 0, streaming=settings),
    ):
        report: Any = model.offload_report
        report()  # copies are timed from now on
        assert is_right(model)
        assert isinstance(model[0].linear._hf_hook.stream, WeightStream)  # type: ignore[index, union-attr]
        assert "GB/s" in str(report())


def streams_parts_within_the_budget(folder: Path) -> None:
    """Half of the model is offloaded, and takes no more memory than planned."""
    model = build()
    size = sum(parameter.nbytes for parameter in model.parameters())
    wanted = expected()
    before = torch.cuda.memory_allocated()
    device_map = infer_auto_device_map(model, {0: size // 2, "cpu": size * 2}, no_split_module_classes=["Block"])
    assert set(device_map.values()) == {0, "cpu"}
    dispatch_model(model, device_map)
    with torch.no_grad():
        assert all(torch.equal(model(inputs()).cpu(), wanted) for _ in range(4))
    assert torch.cuda.memory_allocated() - before <= size // 2 * 1.05


def gives_gradients_in_any_order(folder: Path) -> None:
    """Modules run in changing orders, and give the gradients of the plain ones."""
    plain, model = build().cuda(), cpu_offload(build(), 0, streaming=Streaming(2, "600KB"))
    for order in ([0, 1, 2, 3], [0, 1, 2, 3], [3, 2, 1], [3, 2, 1], [0, 3]):
        mine, theirs = inputs().cuda().requires_grad_(), inputs().cuda().requires_grad_()
        left, right = mine, theirs
        for index in order:
            left, right = model[index](left), plain[index](right)  # type: ignore[index, operator]
        left.sum().backward()
        right.sum().backward()
        assert torch.equal(left, right)
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


def loads_spreads_and_copies(folder: Path) -> None:
    """A checkpoint goes to the GPU, CPU memory and the disk; copies of the model compute what it does."""
    write_model_folder(build().state_dict(), folder / "model", "500KB")
    with init_empty_weights():
        model = build()
    device_map = {str(index): (0, "cpu", "disk")[index % 3] for index in range(LAYERS)}
    load_checkpoint_and_dispatch(model, folder / "model", device_map)
    assert is_right(model)
    assert not list(folder.rglob("*.dat"))
    copied = copy.deepcopy(model)
    torch.save(model, folder / "model.pt")
    del model
    assert is_right(copied)
    assert is_right(torch.load(folder / "model.pt", weights_only=False))  # noqa: TID251 - as programs do


def loads_a_large_checkpoint(folder: Path) -> None:
    """Threads read it through pinned buffers, and some of it is converted behind the copies."""
    torch.manual_seed(0)
    state = {f"{index}.weight": torch.randn(3000, 1500 + index) for index in range(6)}
    write_model_folder(state, folder / "large", "40MB")
    for dtype in (None, torch.bfloat16):
        with init_empty_weights():
            model = nn.Sequential(*[nn.Linear(1500 + index, 3000, bias=False) for index in range(6)])
        load_checkpoint_in_model(model, folder / "large", device_map={"": 0}, dtype=dtype)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor.cpu(), state[name].to(tensor.dtype))


def sends_the_model_before_back(folder: Path) -> None:
    """In a pipeline of models, one at a time is on the GPU."""
    first, hook = cpu_offload_with_hook(nn.Linear(2, 2), 0)
    second, _ = cpu_offload_with_hook(nn.Linear(2, 2), 0, prev_module_hook=hook)
    second(first(torch.ones(1, 2)))
    assert next(first.parameters()).device.type == "cpu"
    assert next(second.parameters()).device.type == "cuda"


@pytest.mark.parametrize(("depth", "budget"), SETTINGS)
def test_everything_is_streamed(depth: int, budget: str | int | None, tmp_path: Path) -> None:
    streams_all(depth, budget, tmp_path)


@pytest.mark.parametrize("body", BODIES)
def test_on_a_gpu(body: str, tmp_path: Path) -> None:
    globals()[body](tmp_path)
