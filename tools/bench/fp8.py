"""Loss curves of training in 8-bit floats: by torchao under the accelerator, by torchao by hand, and in bfloat16.

Alone, under DDP and under FSDP 2. On a CPU the products are emulated, so the figures are about numbers, not about speed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench.row import Row
from tools.reference import run_on_ranks

STEPS, BATCH, WIDTH, BLOCKS = 60, 32, 64, 4
APART, WORSE = 1e-5, 1.1  # the goals: a curve beside that by hand, and the last losses beside those of bfloat16
CASES = {1: ("alone",), 2: ("DDP, 2 ranks", "FSDP 2, 2 ranks")}


def rows(reference: Path) -> list[Row]:
    """Measure ours beside plain torchao; accelerate 1.15 does not train in FP8 on the CPU."""
    figures = []
    for ranks in CASES:
        for case, curves in run_on_ranks(sys.executable, __file__, world=ranks).items():
            hand, ours, bf16 = curves["hand"], curves["fp8"], curves["bf16"]
            apart = max(abs(one - other) / other for one, other in zip(ours, hand, strict=True))
            figures.append(
                Row(f"FP8 loss curve off that of torchao by hand: {case}", "x", apart, None, 0.0, apart, APART)
            )
            ends = [sum(curve[-10:]) / 10 for curve in (ours, hand, bf16)]
            what = f"FP8 loss of the last 10 of {STEPS} steps, over bf16's: {case}"
            figures.append(Row(what, "", ends[0], None, ends[1], ends[0] / ends[2], WORSE))
    return figures


def worker() -> None:
    """One rank: train in each way, and let rank 0 print the curves."""
    import torch

    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import PartialState

    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    curves_of = {}
    for case in CASES[state.num_processes]:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
        settings = {"fsdp_plugin": plugin} if case.startswith("FSDP") else {}
        curves = {name: prepared({"mixed_precision": name, **settings}) for name in ("fp8", "bf16")}
        curves_of[case] = {**curves, "hand": by_hand(case)}
    if state.is_main_process:
        print(json.dumps(curves_of), flush=True)
    state.destroy_process_group()


def make() -> tuple[Any, Any, Any]:
    """Residual blocks between two layers, and the inputs and targets of this rank: (steps, batch, width)."""
    import torch
    from torch import nn

    from accelerate.state import PartialState

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + self.down(torch.relu(self.up(hidden)))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, WIDTH))
    target = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
    draw = torch.Generator().manual_seed(PartialState().process_index)
    inputs = torch.randn(STEPS, BATCH, WIDTH, generator=draw)
    return model, inputs, (inputs @ target).relu()


def prepared(settings: dict[str, Any]) -> list[float]:
    """The losses of a prepared model; the settings are the accelerator's."""
    import torch
    from torchao.float8 import Float8LinearConfig

    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import AORecipeKwargs

    AcceleratorState._reset_state()
    recipe = AORecipeKwargs(config=Float8LinearConfig(emulate=True))
    handlers = [recipe] if settings["mixed_precision"] == "fp8" else []
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, **settings)
    model, inputs, targets = make()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return train(model, optimizer, inputs, targets, accelerator.backward)


def by_hand(case: str) -> list[float]:
    """The losses of a model that torchao converts and torch trains, with bfloat16 for what is not converted."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model, inputs, targets = make()
    ends = ("0", str(BLOCKS + 1))
    convert_to_float8_training(
        model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda _, name: name not in ends
    )
    if case.startswith("DDP"):
        model = DistributedDataParallel(model)
    elif case.startswith("FSDP"):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in [*model[1:-1], model]:
            fully_shard(block, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def forward(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not case.startswith("FSDP")):
            return model(batch)

    return train(forward, optimizer, inputs, targets, torch.Tensor.backward)


def train(
    model: Callable[[Any], Any], optimizer: Any, inputs: Any, targets: Any, backward: Callable[[Any], None]
) -> list[float]:
    """Train, and return the loss of each step."""
    losses = []
    for batch, target in zip(inputs, targets, strict=True):
        loss = (model(batch).float() - target).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    worker()
