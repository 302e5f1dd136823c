"""Loss curves of training in 8-bit floats: prepared by `Accelerator`, by torchao by hand, and in bfloat16.

The programs beside this file train the same residual blocks each in one way of distributing them. On a CPU the products are
emulated, so the figures are about numbers, not about speed. The first line printed is the curves as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import AORecipeKwargs

STEPS, BATCH, WIDTH, BLOCKS = 60, 32, 64, 4
LAST = 10  # steps whose mean loss is compared
EMULATED = Float8LinearConfig(emulate=True)

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes a batch and its targets, takes an optimizer step, and returns the loss."""


class Block(nn.Module):
    """A residual block; input and output are of shape (batch, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Add what two layers make of the input."""
        return hidden + self.down(torch.relu(self.up(hidden)))


def make_model() -> nn.Module:
    """The blocks between a first and a last layer, which stay in higher precision."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, WIDTH))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all curves."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def convert_by_hand(model: nn.Module) -> nn.Module:
    """Have torchao compute all layers but the first and the last in 8-bit floats."""
    ends = ("0", str(BLOCKS + 1))
    convert_to_float8_training(model, config=EMULATED, module_filter_fn=lambda _, name: name not in ends)
    return model


def compare(by_hand: Callable[[], Step], settings: Callable[[], dict[str, Any]] = dict) -> None:
    """Train in the three ways, and print the curves and what they say.

    Args:
        by_hand: Makes the step of a model of `convert_by_hand`, without `Accelerator`.
        settings: Makes the arguments of `Accelerator`.
    """
    torch.set_num_threads(1)
    state = PartialState()
    curves = {name: train(prepared(name, settings())) for name in ("fp8", "bf16")}
    curves["hand"] = train(by_hand())
    if state.is_main_process:
        apart = max(abs(one - other) / other for one, other in zip(curves["fp8"], curves["hand"], strict=True))
        ends = {name: sum(curve[-LAST:]) / LAST for name, curve in curves.items()}
        print(json.dumps(curves), flush=True)
        print(f"mean loss of the last {LAST} of {STEPS} steps, on {state.num_processes} processes:")
        print(f"  FP8, prepared {ends['fp8']:.6f}   FP8, by hand {ends['hand']:.6f}   bf16 {ends['bf16']:.6f}")
        print(
            f"  FP8 prepared and by hand are at most {apart:.1e} apart; FP8 is {ends['fp8'] / ends['bf16']:.3f} x bf16"
        )
    state.destroy_process_group()


def prepared(mixed_precision: str, settings: dict[str, Any]) -> Step:
    """The step of a prepared model."""
    AcceleratorState._reset_state()
    handlers = [AORecipeKwargs(config=EMULATED)] if mixed_precision == "fp8" else []
    accelerator = Accelerator(mixed_precision=mixed_precision, kwargs_handlers=handlers, **settings)
    model = make_model()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    dtype = next(model.parameters()).dtype  # DeepSpeed keeps them in bfloat16
    return stepping(model, optimizer, accelerator.backward, dtype)


def stepping(
    model: Callable[[Any], Any],
    optimizer: Any,
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """The step of a loop of PyTorch; batches are given to the model in the dtype."""

    def step(batch: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = (model(batch.to(dtype)).float() - target).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def train(step: Step) -> list[float]:
    """Train on this process's own batches, and return the loss of each step."""
    state = PartialState()
    draw = torch.Generator().manual_seed(state.process_index)
    target = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5
    inputs = torch.randn(STEPS, BATCH, WIDTH, generator=draw)
    pairs = zip(inputs.to(state.device), (inputs @ target).relu().to(state.device), strict=True)
    return [step(batch, targets).item() for batch, targets in pairs]


def under_autocast(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward pass whose unconverted layers compute in bfloat16."""

    def forward(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(batch.device.type, torch.bfloat16):
            output: torch.Tensor = model(batch)
        return output

    return forward
