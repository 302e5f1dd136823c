"""Weights that travel to a GPU while it computes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_bigmodel.checkpoint.write import write_model_folder
from accel_bigmodel.device_map.plan import infer_auto_device_map
from accel_bigmodel.dispatch import cpu_offload, disk_offload, dispatch_model, load_checkpoint_and_dispatch
from accel_bigmodel.empty import init_empty_weights
from accel_bigmodel.streaming.settings import Streaming
from accel_bigmodel.streaming.stream import WeightStream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
WIDTH, LAYERS = 256, 8


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


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def expected(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return build().cuda()(x.cuda()).cpu()


@pytest.mark.parametrize("settings", [Streaming(), Streaming(0), Streaming(3, "1MB"), Streaming(1, 1)])
def test_everything_travels(settings: Streaming, x: torch.Tensor, expected: torch.Tensor, tmp_path: Path) -> None:
    write_model_folder(build().state_dict(), tmp_path)
    with init_empty_weights():
        empty = build()
    for model in (cpu_offload(build(), 0, streaming=settings), disk_offload(empty, tmp_path, 0, streaming=settings)):
        model.offload_report()  # copies are timed from now on
        with torch.no_grad():
            for _ in range(4):
                assert torch.equal(model(x).cpu(), expected)
        assert isinstance(model[0].linear._hf_hook.stream, WeightStream)
        assert "GB/s" in str(model.offload_report())


def test_parts_travel_within_the_budget(x: torch.Tensor, expected: torch.Tensor) -> None:
    model = build()
    size = sum(parameter.nbytes for parameter in model.parameters())
    before = torch.cuda.memory_allocated()
    device_map = infer_auto_device_map(model, {0: size // 2, "cpu": size * 2}, no_split_module_classes=["Block"])
    assert set(device_map.values()) == {0, "cpu"}
    dispatch_model(model, device_map)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(model(x).cpu(), expected)
    assert torch.cuda.memory_allocated() - before <= size // 2 * 1.05


def test_gradients_and_changed_orders(x: torch.Tensor) -> None:
    plain, model = build().cuda(), cpu_offload(build(), 0, streaming=Streaming(2, "600KB"))
    for order in ([0, 1, 2, 3], [0, 1, 2, 3], [3, 2, 1], [3, 2, 1], [0, 3]):
        mine, theirs = x.cuda().requires_grad_(), x.cuda().requires_grad_()
        left, right = mine, theirs
        for index in order:
            left, right = model[index](left), plain[index](right)
        left.sum().backward()
        right.sum().backward()
        assert torch.equal(left, right)
        assert torch.equal(mine.grad, theirs.grad)


def test_a_checkpoint_is_loaded_and_spread(x: torch.Tensor, expected: torch.Tensor, tmp_path: Path) -> None:
    write_model_folder(build().state_dict(), tmp_path / "model", "500KB")
    with init_empty_weights():
        model = build()
    device_map = {str(index): (0, "cpu", "disk")[index % 3] for index in range(LAYERS)}
    load_checkpoint_and_dispatch(model, tmp_path / "model", device_map)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(model(x).cpu(), expected)
    assert not list(tmp_path.rglob("*.dat"))
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        copy.deepcopy(model)
